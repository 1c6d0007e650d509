"""Prompt templates: files of named sections, checked when they are read.

A template is a YAML file under `properties/prompt/`. Each section is text with `$name` placeholders; the sections, and
the placeholders that each may use, are listed here. A template holds the prompt, in its parts, and the reasoning trace
that answers it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.system.cache import digest_of

SECTIONS: dict[str, tuple[str, ...]] = {
    "system": (),
    "opening": ("kinds", "history"),
    "history_item": ("sid", "title", "kinds", "brand"),
    "candidate": ("label", "sid", "title", "kinds", "brand", "facts"),
    "fact": ("name", "words", "symbol", "level"),
    "closing": (),
    "pattern": ("kinds",),
    "category": ("same", "linked"),
    "scores": ("scores",),
    "score": ("label", "score"),
    "strong": ("place", "score", "label", "sid", "facts"),
    "cited_fact": ("name", "words", "symbol", "level"),
    "answer": ("label", "sid", "facts", "ranking"),
}
"""Sections of a template and the placeholders that each may use."""

TRACE_SECTIONS: tuple[str, ...] = ("pattern", "category", "scores", "score", "strong", "cited_fact", "answer")
"""Those of the trace; the others are of the prompt."""

OPTIONAL: tuple[str, ...] = ("system", "category")
"""Sections that a template may leave out: they are empty then."""

REQUIRED: dict[str, str] = {"candidate": "label", "answer": "ranking"}
"""Placeholders without which a section cannot do its work."""

LISTS: tuple[str, ...] = ("places", "drill_places")
NUMBERS: tuple[str, ...] = ("history_items", "title_words")
SETTINGS: dict[str, Any] = {"chat": False, "separator": " ", "fact_words": {}}
"""Other entries that may be left out, and what they are then."""


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
    chat: bool = False
    """Whether the prompt is a conversation in the tokenizer's form: `system`, then the rest as the user's message."""
    separator: str = " "
    """What stands between categories."""
    fact_words: Mapping[str, str] = field(default_factory=dict)
    """$words of each fact, by its name; without them $words is the name."""
    name: str = "own"

    def fill(self, section: str, **values: object) -> str:
        """The section's text with its placeholders filled."""
        return self.sections[section].substitute(values)

    def render_fact(self, section: str, name: str, level: int) -> str:
        """One fact of a candidate in words; `section` is `fact` or `cited_fact`."""
        words = self.fact_words.get(name, name)
        return self.fill(section, name=name, words=words, symbol=name[0], level=int(level))

    @property
    def trace_form(self) -> str:
        """Stands for all that decides how a trace is worded or framed, beside the prompt."""
        sections = [self.sections[name].template for name in TRACE_SECTIONS]
        return digest_of([sections, self.places, self.separator, dict(self.fact_words)])

    @property
    def thinks(self) -> bool:
        """Whether the trace opens with a thinking tag of its own."""
        return self.sections["pattern"].template.lstrip().startswith("<think>")

    @property
    def shows_sids(self) -> bool:
        """Whether any section names items by semantic ID."""
        return any("sid" in _placeholders(section) for section in self.sections.values())


def load_template(path: Path) -> PromptTemplate:
    """Read and check a template file.

    Raises:
        FileNotFoundError: no such template; the near ones are named.
        ValueError: a section is missing, unknown, or uses a placeholder that it may not.
    """
    values = _read(path)
    _check_names(path, values)
    for name in NUMBERS:
        number = values[name]
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{path}: {name} is {number!r}; expected a whole number of at least 0")
    for name in LISTS:
        if not isinstance(values[name], list):
            raise ValueError(f"{path}: {name} is {values[name]!r}; expected a list of words")
    sections = {name: _section(path, name, values.get(name, "")) for name in SECTIONS}
    places, drill_places = (tuple(str(place) for place in values[name]) for name in LISTS)
    if not places:
        raise ValueError(
            f"{path}: places is empty; expected a word for each candidate to promote, e.g. [first, second]"
        )
    return PromptTemplate(
        sections=sections,
        places=places,
        history_items=values["history_items"],
        title_words=values["title_words"],
        drill_places=drill_places,
        name=path.stem,
        **_settings(path, values),
    )


def _read(path: Path) -> dict[str, Any]:
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
    return values


def _check_names(path: Path, values: Mapping[str, Any]) -> None:
    expected = (*SECTIONS, *LISTS, *NUMBERS, *SETTINGS)
    for name in values:
        if name not in expected:
            near = difflib.get_close_matches(str(name), expected, n=1)
            raise ValueError(
                f"{path}: unknown section {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    for name in expected:
        if name not in values and name not in OPTIONAL and name not in SETTINGS:
            raise ValueError(f"{path}: section {name!r} is missing")


def _settings(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of SETTINGS, checked."""
    found = {name: values.get(name, default) for name, default in SETTINGS.items()}
    if not isinstance(found["chat"], bool):
        raise ValueError(f"{path}: chat is {found['chat']!r}; expected true or false")
    if not isinstance(found["separator"], str):
        raise ValueError(f"{path}: separator is {found['separator']!r}; expected text in quotes")
    words = found["fact_words"]
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        raise ValueError(f"{path}: fact_words is {words!r}; expected words for each of {', '.join(FACTS)}")
    wrong = sorted(map(str, set(words) ^ set(FACTS))) if words else []
    if wrong:
        raise ValueError(
            f"{path}: fact_words {'lacks' if wrong[0] in FACTS else 'has an unknown'} {wrong[0]!r}; "
            f"expected words for each of {', '.join(FACTS)}"
        )
    return found


def _section(path: Path, name: str, text: object) -> Template:
    if not isinstance(text, str):
        raise ValueError(f"{path}: section {name!r} is {text!r}; expected text in quotes")
    template = Template(text)
    if any(match["invalid"] is not None for match in template.pattern.finditer(text)):
        raise ValueError(
            f"{path}: section {name!r} has a $ that begins no placeholder; write $$ for a dollar sign"
        )
    used = _placeholders(template)
    wrong = sorted(set(used) - set(SECTIONS[name]))
    if wrong:
        allowed = ", ".join(f"${placeholder}" for placeholder in SECTIONS[name]) or "none"
        raise ValueError(f"{path}: section {name!r} uses ${wrong[0]}; its placeholders are {allowed}")
    if name in REQUIRED and REQUIRED[name] not in used:
        raise ValueError(f"{path}: section {name!r} must use ${REQUIRED[name]}")
    if used.count("history") > 1:
        raise ValueError(
            f"{path}: section {name!r} uses $history {used.count('history')} times; expected once"
        )
    return template


def _placeholders(section: Template) -> list[str]:
    """Names of the placeholders of a section, in the order of its text."""
    names = (match["named"] or match["braced"] for match in section.pattern.finditer(section.template))
    return [name for name in names if name is not None]
