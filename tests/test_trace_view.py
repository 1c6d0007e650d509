"""Views of a decode: what is told of each slot, in the terminal and in the page."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from recbole_dgr2.decode import DecodingTrace
from recbole_dgr2.report.trace_view import (
    MASK,
    colour_of,
    counts_of,
    print_view,
    render_html,
    view_of,
    write_html,
)
from tests.decoding import options_of, requests_of, run

TRACE = DecodingTrace(
    tokens=(7, 8, 9, 1, 5, 90),
    steps=(0, 1, 2, 1, 1, -1),
    log_probs=(0.0,) * 6,
    confidences=(1.0, 0.9, 0.3, 0.95, 0.8, 0.0),
    block_size=3,
    tau=0.9,
    temperature=0.0,
    passes=(0, 1, 2, 4, 4, -1),
)
WORDS = {7: "<a>", 8: " red", 9: "\n", 1: "end", 5: "x & y"}


def test_words_and_counts() -> None:
    view = view_of(TRACE, 4, WORDS.__getitem__, "block")
    assert view.words == ("<a>", " red", "\n", "end", "x & y", MASK)
    assert counts_of(view) == [1, 1, 1, 0, 2]


def test_terminal_shows_each_pass_and_only_the_answer() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_view(view_of(TRACE, 4, WORDS.__getitem__, "block 0.9"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines()[:2] == ["block 0.9", "[0]<a>[1] red[2]⏎[4]end"]
    assert "   1      1   red" in text
    assert "x & y" not in text


class Spans(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.passes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if "data-pass" in values:
            self.passes.append(str(values["data-pass"]))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_one_file_and_keeps_text_as_text(tmp_path: Path) -> None:
    view = view_of(TRACE, 4, WORDS.__getitem__, "a <b> title")
    write_html([view, view], tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert page == render_html([view, view])
    spans = Spans()
    spans.feed(page)
    assert spans.passes == ["0", "1", "2", "4", "4", "-1"] * 2
    assert "<a>" in spans.text and "x & y" in spans.text and "a <b> title" in spans.text
    assert not re.search(r"(src|href)\s*=", page)  # nothing is loaded
    assert "confidence 0.3000" in page and "never committed" in page
    assert page.count('class="slot after') == 4


def test_colours_run_from_weak_to_sure() -> None:
    assert colour_of(0.0) == colour_of(-1.0) == "#d6604d"
    assert colour_of(1.0) == "#4393c3"


@pytest.mark.parametrize("mode", ["autoregressive", "block", "speculative"])
def test_every_mode_records_the_pass_of_each_slot(mode: str) -> None:
    (got,) = run(requests_of([5]), options_of(mode)).completions
    view = view_of(got.trace, len(got.token_ids), str)
    assert max(view.passes) == got.passes
    assert sum(counts_of(view)) == sum(at >= 0 for at in view.passes)
    assert view.passes[0] == 0


def test_a_trace_without_passes_is_refused() -> None:
    bare = DecodingTrace((1, 2), (0, 0), (0.0, 0.0), (1.0, 1.0), 1, 0.9, 0.0)
    with pytest.raises(ValueError, match="2 tokens but 0 passes"):
        view_of(bare, 2, str)
