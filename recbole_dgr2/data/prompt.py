"""Prompts as data: a template file of named sections, filled for one user's list of candidates.

A template is a YAML file under `properties/prompt/`. Each section is text with `$name` placeholders; the sections and
the placeholders each may use are checked when the file is loaded. Candidates are named by labels `<c1>` .. `<cN>` in
the retriever's order; every tokenizer gets them as single tokens, so an answer is one token a candidate.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np
import yaml

from recbole_dgr2.data.item_text import UNKNOWN, ItemText
from recbole_dgr2.data.tasks import RankingTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LABEL = re.compile(r"<c([1-9][0-9]{0,5})>")
_OPENING_BRACKET = re.compile(r"([<\[])(?=\S)")

SECTIONS: dict[str, tuple[str, ...]] = {
    "opening": ("kinds", "history"),
    "history_item": ("title", "kinds"),
    "candidate": ("label", "title", "kinds", "facts"),
    "fact": ("name", "symbol", "level"),
    "closing": (),
    "pattern": ("kinds",),
    "scores": ("scores",),
    "score": ("label", "score"),
    "strong": ("place", "score", "label", "facts"),
    "cited_fact": ("name", "symbol", "level"),
    "answer": ("label", "facts", "ranking"),
}
"""Sections of a template and the placeholders that each may use."""

REQUIRED: dict[str, str] = {"candidate": "label", "answer": "ranking"}
"""Placeholders without which a section cannot do its work."""

LISTS: tuple[str, ...] = ("places", "drill_places")
NUMBERS: tuple[str, ...] = ("history_items", "title_words")


def label(slot: int) -> str:
    """Name of the candidate in 0-based `slot`."""
    return f"<c{slot + 1}>"


def slot_of_label(text: str) -> int | None:
    """0-based slot that `text` names, None where it is no label."""
    match = _LABEL.fullmatch(text)
    return int(match.group(1)) - 1 if match else None


def plain(text: str) -> str:
    """Data-set text that no tokenizer can take for a label or a special token.

    Such tokens are written in brackets without a space after the first (`<c3>`, `<|eos|>`, `[SEP]`), and tokenizers
    find them in any text, in a title as well. A space goes after every opening bracket of that kind.
    """
    return _OPENING_BRACKET.sub(r"\1 ", text)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the half-open token span [start, end) of every candidate's line."""

    token_ids: tuple[int, ...]
    candidate_spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PromptTemplate:
    """Sections of a prompt and of the reasoning trace that answers it; see SECTIONS for their placeholders."""

    sections: dict[str, Template]
    places: tuple[str, ...]
    """Words for the candidates that the trace discusses, best first; their number is how many it discusses."""
    history_items: int
    """History items that are listed, newest last."""
    title_words: int
    """Words of a title that are shown; the rest is cut."""
    drill_places: tuple[str, ...] = ()
    """Words for the candidates after those of `places` that a drill names as well, for practice."""

    def fill(self, section: str, **values: object) -> str:
        """The section's text with its placeholders filled."""
        return self.sections[section].substitute(values)

    def render_fact(self, section: str, name: str, level: int) -> str:
        """One fact of a candidate in words; `section` is `fact` or `cited_fact`."""
        return self.fill(section, name=name, symbol=name[0], level=int(level))


def load_template(path: Path) -> PromptTemplate:
    """Read and check a template file.

    Raises:
        FileNotFoundError: no such template; the near ones are named.
        ValueError: a section is missing, unknown, or uses a placeholder that it may not.
    """
    if not path.is_file():
        known = sorted(other.stem for other in path.parent.glob("*.yaml"))
        near = difflib.get_close_matches(path.stem, known, n=1) or known
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise FileNotFoundError(f"prompt {path.stem!r}: no file {path}{hint}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected sections {', '.join(SECTIONS)}")
    expected = (*SECTIONS, *LISTS, *NUMBERS)
    for name in values:
        if name not in expected:
            near = difflib.get_close_matches(str(name), expected, n=1)
            raise ValueError(
                f"{path}: unknown section {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    for name in expected:
        if name not in values:
            raise ValueError(f"{path}: section {name!r} is missing")
    for name in NUMBERS:
        if not isinstance(values[name], int) or values[name] < 0:
            raise ValueError(f"{path}: {name} is {values[name]!r}; expected a whole number of at least 0")
    for name in LISTS:
        if not isinstance(values[name], list):
            raise ValueError(f"{path}: {name} is {values[name]!r}; expected a list of words")
    sections = {name: _section(path, name, values[name]) for name in SECTIONS}
    places, drill_places = (tuple(str(place) for place in values[name]) for name in LISTS)
    if not places:
        raise ValueError(
            f"{path}: places is empty; expected a word for each candidate to promote, e.g. [first, second]"
        )
    return PromptTemplate(sections, places, values["history_items"], values["title_words"], drill_places)


def _section(path: Path, name: str, text: object) -> Template:
    if not isinstance(text, str):
        raise ValueError(f"{path}: section {name!r} is {text!r}; expected text in quotes")
    template = Template(text)
    used = set()
    for match in template.pattern.finditer(text):
        if match["invalid"] is not None:
            raise ValueError(
                f"{path}: section {name!r} has a $ that begins no placeholder; write $$ for a dollar sign"
            )
        used.add(match["named"] or match["braced"])
    wrong = sorted(used - {None, *SECTIONS[name]})
    if wrong:
        allowed = ", ".join(f"${placeholder}" for placeholder in SECTIONS[name]) or "none"
        raise ValueError(f"{path}: section {name!r} uses ${wrong[0]}; its placeholders are {allowed}")
    if name in REQUIRED and REQUIRED[name] not in used:
        raise ValueError(f"{path}: section {name!r} must use ${REQUIRED[name]}")
    return template


class PromptBuilder:
    """Turns ranking tasks into prompts with one template, one tokenizer and the items' text."""

    def __init__(
        self,
        template: PromptTemplate,
        item_text: ItemText,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
    ) -> None:
        """`max_tokens` is the longest prompt that leaves room for a response."""
        self.template = template
        self.item_text = item_text
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    def build(self, task: RankingTask) -> Prompt:
        """The prompt of one task. Too long a prompt loses its oldest history items first, never a candidate.

        Raises:
            ValueError: the candidates alone do not fit; the task is named.
        """
        for listed in range(min(self.template.history_items, len(task.history)), -1, -1):
            texts = render_prompt(self.template, self.item_text, task, listed)
            pieces = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            if sum(map(len, pieces)) <= self.max_tokens:
                return _join(pieces)
        raise ValueError(
            f"list {task.key}: the prompt has {sum(map(len, pieces))} tokens without any history, the model's limit "
            f"leaves {self.max_tokens}; lower n_candidates or max_new_tokens"
        )


def _join(pieces: list[list[int]]) -> Prompt:
    bounds = np.cumsum([0, *map(len, pieces)])
    spans = tuple((int(bounds[i]), int(bounds[i + 1])) for i in range(1, len(pieces) - 1))
    return Prompt(tuple(token for piece in pieces for token in piece), spans)


def render_prompt(template: PromptTemplate, item_text: ItemText, task: RankingTask, listed: int) -> list[str]:
    """Texts of the opening, of each candidate, and of the closing; `listed` history items are shown."""
    shown = task.history[max(len(task.history) - listed, 0) :]
    history = "".join(
        template.fill("history_item", **_item_words(template, item_text, item)) for item in shown
    )
    opening = template.fill(
        "opening", kinds=" ".join(history_kinds(item_text, task.history)), history=history
    )
    lines = [
        template.fill(
            "candidate",
            label=label(slot),
            facts="".join(
                template.render_fact("fact", name, level)
                for name, level in zip(task.fact_names, task.levels[slot], strict=True)
            ),
            **_item_words(template, item_text, item),
        )
        for slot, item in enumerate(task.candidates)
    ]
    return [opening, *lines, template.fill("closing")]


def _item_words(template: PromptTemplate, item_text: ItemText, item: int) -> dict[str, str]:
    title = " ".join(item_text.title(item).split()[: template.title_words])
    return {"title": plain(title), "kinds": plain(" ".join(item_text.categories[item]))}


def history_kinds(item_text: ItemText, history: Sequence[int], recent: int = 10, most: int = 2) -> list[str]:
    """The categories most frequent in the last `recent` items; ties go to the newer one."""
    counts = Counter(kind for item in reversed(history[-recent:]) for kind in item_text.categories[item])
    return [plain(kind) for kind, _ in counts.most_common(most)] or [UNKNOWN]
