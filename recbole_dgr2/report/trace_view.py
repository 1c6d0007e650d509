"""One decode made visible: which slot was committed at which pass, with which confidence.

In the terminal as coloured text with a line a pass, and as one HTML file that needs nothing else and can be stepped
through pass by pass.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from recbole_dgr2.system.cache import write_text

MASK = "░"
_WEAK, _SURE = (
    (214, 96, 77),
    (67, 147, 195),
)  # colours of confidence 0 and 1, told apart by colour-blind readers too


class Trace(Protocol):
    """What is read of a decoding trace; one entry a slot."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def passes(self) -> tuple[int, ...]: ...
    @property
    def confidences(self) -> tuple[float, ...]: ...
    @property
    def block_size(self) -> int: ...


@dataclass(frozen=True)
class View:
    """A decode in words. words, passes, confidences: one a slot; passes -1: still masked when decoding stopped.

    length: slots of the answer; those after it, in the last block, are context only. title: one line above it.
    """

    words: tuple[str, ...]
    passes: tuple[int, ...]
    confidences: tuple[float, ...]
    block_size: int
    length: int
    title: str


def view_of(trace: Trace, length: int, word_of: Callable[[int], str], title: str = "") -> View:
    """The view of a trace whose answer has `length` tokens; word_of: text of one token.

    ValueError: the trace lacks the pass of each slot.
    """
    if len(trace.passes) != len(trace.tokens):
        raise ValueError(
            f"the trace has {len(trace.tokens)} tokens but {len(trace.passes)} passes: record them"
        )
    words = tuple(
        word_of(token) if at >= 0 else MASK for token, at in zip(trace.tokens, trace.passes, strict=True)
    )
    return View(words, trace.passes, trace.confidences, trace.block_size, length, title)


def counts_of(view: View) -> list[int]:
    """Slots that each pass committed; index 0 is the prefill."""
    return [view.passes.count(at) for at in range(max(view.passes, default=-1) + 1)]


def colour_of(confidence: float) -> str:
    """#rrggbb of a confidence in [0, 1]."""
    share = min(max(confidence, 0.0), 1.0) ** 2  # most confidences are near 1: spread them
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(_WEAK, _SURE, strict=True))


def print_view(view: View, console: Console | None = None) -> None:
    """The answer coloured by confidence with the pass of every run of tokens, then what each pass added."""
    console = console or Console()
    if view.title:
        console.print(Text(view.title, style="bold"))
    answer = Text()
    before = None
    for word, at, confidence in _answer(view):
        if at != before:
            answer.append(f"[{at}]", style="dim")
            before = at
        answer.append(_visible(word), style=colour_of(confidence))
    console.print(answer)
    console.print(Text("pass  slots  new tokens", style="dim"))
    for at, count in enumerate(counts_of(view)):
        line = Text(f"{at:4d}  {count:5d}  ")
        last = None
        for slot, (word, own, confidence) in enumerate(_answer(view)):
            if own == at:
                line.append("" if last in (None, slot - 1) else " … ", style="dim")
                line.append(_visible(word), style=colour_of(confidence))
                last = slot
        console.print(line)


def _answer(view: View) -> list[tuple[str, int, float]]:
    slots = zip(view.words, view.passes, view.confidences, strict=True)
    return list(slots)[: view.length]


def _visible(word: str) -> str:
    return word.replace("\n", "⏎")


def render_html(views: Sequence[View]) -> str:
    """One HTML page of all views; nothing is loaded from elsewhere."""
    sections = "\n".join(_section(view) for view in views)
    legend = "".join(
        f'<span class="slot" style="background:{colour_of(c)}">{c:.2f}</span>'
        for c in (0.2, 0.5, 0.8, 0.9, 1.0)
    )
    return _PAGE.replace("$legend", legend).replace("$sections", sections)


def write_html(views: Sequence[View], path: Path) -> None:
    """`render_html` to a file, whole or not at all."""
    write_text(path, render_html(views))


def _section(view: View) -> str:
    spans = []
    for slot, (word, at, confidence) in enumerate(
        zip(view.words, view.passes, view.confidences, strict=True)
    ):
        start = slot % view.block_size == 0 and slot > 0 and view.block_size > 1
        state = ("slot" if slot < view.length else "slot after") + (" start" if start else "")
        tip = f"slot {slot}, block {slot // view.block_size}, " + (
            f"pass {at}, confidence {confidence:.4f}" if at >= 0 else "never committed"
        )
        spans.append(
            f'<span class="{state}" data-pass="{at}" style="background:{colour_of(confidence)}" '
            f'title="{tip}">{html.escape(_visible(word)) or "&nbsp;"}</span>'
        )
    last = max(view.passes, default=0)
    counts = json.dumps(counts_of(view))
    return (
        f'<section data-counts="{counts}"><h2>{html.escape(view.title)}</h2><label>pass '
        f'<input type="range" min="0" max="{last}" value="{last}"> <output></output></label>'
        f'<p class="text">{"".join(spans)}</p></section>'
    )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Decoding, pass by pass</title>
<style>
body { font: 15px/1.9 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
h2 { font-size: 1rem; margin: 2rem 0 .3rem; }
.text { font-family: ui-monospace, monospace; }
.slot { color: #fff; border-radius: 3px; padding: 1px 3px; margin: 0 1px; white-space: pre-wrap; }
.start { margin-left: 12px; }
.after { opacity: .35; }
.slot.masked { background: #ddd !important; color: #ddd; }
.slot.fresh { outline: 2px solid #222; }
input { width: 20rem; vertical-align: middle; }
</style></head><body>
<h1>Decoding, pass by pass</h1>
<p>Colour is the confidence when the slot was committed: $legend. A gap begins a block, a frame marks what the
chosen pass committed, grey is still masked; slots after the end of the answer are faint.</p>
$sections
<script>
for (const section of document.querySelectorAll("section")) {
  const range = section.querySelector("input"), counts = JSON.parse(section.dataset.counts);
  const show = () => {
    const now = Number(range.value);
    for (const slot of section.querySelectorAll(".slot")) {
      const at = Number(slot.dataset.pass);
      slot.classList.toggle("masked", at < 0 || at > now);
      slot.classList.toggle("fresh", at === now);
    }
    section.querySelector("output").value = now + " of " + range.max + ": " + counts[now] + " slots";
  };
  range.addEventListener("input", show);
  show();
}
</script></body></html>
"""
