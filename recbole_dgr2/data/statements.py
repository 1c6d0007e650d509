"""What a trace says about the candidates, read back with the sections of the template that traces are written by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from string import Template

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.ranking import last_object
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_reading import IDENTIFIER

_LABEL = r"<c[1-9][0-9]*>"
_ANYTHING = r"(?s:.{0,600}?)"
_NEVER = r"(?!)"
_NAMES = ("name", "words", "symbol")
"""Placeholders that name a fact."""


@dataclass(frozen=True)
class Claim:
    """A fact that a trace states of a candidate. sound: whether its words fit together (its letter is its name's)."""

    slot: int
    fact: str
    level: int
    sound: bool = True


@dataclass(frozen=True)
class Statements:
    """What one trace says. Slots are 0-based and may lie outside the list.

    reasoning: all but the ranked list. cited: every label and semantic ID in it, in order. scores: (slot, score), as
    often as stated. promoted: (place, slot) of the candidates discussed, place 0 the best. claims: facts stated.
    praised: slot of the candidate that the explanation names first, None where it names none.
    """

    reasoning: str
    cited: tuple[str, ...]
    scores: tuple[tuple[int, int], ...]
    promoted: tuple[tuple[int, int], ...]
    claims: tuple[Claim, ...]
    praised: int | None


class StatementReader:
    """Reads traces of one template; what is written in another form than its sections is not seen."""

    def __init__(self, template: PromptTemplate) -> None:
        self._template = template

    def read(self, text: str) -> Statements:
        """The statements of a raw response, whole or broken off."""
        start, _, answer = last_object(text)
        explanation = str(answer.get("explanation", ""))
        reasoning = text[:start]
        strong = list(self._strong.finditer(reasoning))
        rest = self._strong.sub("", reasoning)
        claims = [claim for match in strong for claim in self._claims(match)]
        named = next((name for name in re.findall(_LABEL, explanation)), None)
        if named is not None:
            claims += self._facts(explanation, _slot(named))
        scored = [*self._score.finditer(rest), *(match for match in strong if "score" in match.groupdict())]
        return Statements(
            reasoning=f"{reasoning}\n{explanation}".strip(),
            cited=tuple(IDENTIFIER.findall(reasoning + explanation)),
            scores=tuple((_slot(match["label"]), int(match["score"])) for match in scored),
            promoted=tuple(
                (self._places.index(match["place"]), _slot(match["label"]))
                for match in strong
                if "place" in match.groupdict()
            ),
            claims=tuple(claims),
            praised=None if named is None else _slot(named),
        )

    def _claims(self, match: re.Match[str]) -> list[Claim]:
        return self._facts(match.groupdict().get("facts", ""), _slot(match["label"]))

    def _facts(self, text: str, slot: int) -> list[Claim]:
        found = []
        for match in self._cited_fact.finditer(text):
            parts = match.groupdict()
            named = [self._named[kind].get(parts[kind], "") for kind in _NAMES if kind in parts]
            found.append(Claim(slot, named[0], int(parts["level"]), sound=len(set(named)) == 1))
        return found

    @property
    def _places(self) -> tuple[str, ...]:
        return (*self._template.places, *self._template.drill_places)

    @property
    def _named(self) -> dict[str, dict[str, str]]:
        """The fact that each name, wording and letter stands for."""
        words = self._template.fact_words
        return {
            "name": {fact: fact for fact in FACTS},
            "words": {words.get(fact, fact): fact for fact in FACTS},
            "symbol": {fact[0]: fact for fact in FACTS},
        }

    @cached_property
    def _strong(self) -> re.Pattern[str]:
        return self._pattern("strong", {"place": _one_of(self._places), "facts": _ANYTHING}, {"label"})

    @cached_property
    def _score(self) -> re.Pattern[str]:
        return self._pattern("score", {}, {"label", "score"})

    @cached_property
    def _cited_fact(self) -> re.Pattern[str]:
        words = {kind: _one_of(tuple(self._named[kind])) for kind in ("name", "words")}
        return self._pattern("cited_fact", {**words, "symbol": r"\w"}, {"level"})

    def _pattern(self, section: str, words: Mapping[str, str], needed: set[str]) -> re.Pattern[str]:
        """A section as a regular expression; one that never matches where it lacks a placeholder that is needed."""
        kinds = {"label": _LABEL, "score": r"-?[0-9]+", "level": r"[0-9]+", "sid": r"(?:<[a-z]_[0-9]+>)*"}
        template = self._template.sections[section]
        pattern, used = _expression(template, {**kinds, **words})
        if pattern.endswith(f"{_ANYTHING})"):
            pattern += r"(?=\n|\Z)"
        return re.compile(pattern if needed <= used else _NEVER)


def _expression(template: Template, words: Mapping[str, str]) -> tuple[str, set[str]]:
    """The regular expression of a section, a group a placeholder, and the names of its groups."""
    pieces, used, end, text = [], set[str](), 0, template.template
    for match in template.pattern.finditer(text):
        pieces.append(re.escape(text[end : match.start()]))
        end = match.end()
        name = match["named"] or match["braced"]
        if name is None:
            pieces.append(re.escape("$"))
        elif name in used:
            pieces.append(f"(?P={name})")
        else:
            used.add(name)
            pieces.append(f"(?P<{name}>{words[name]})")
    return "".join((*pieces, re.escape(text[end:]))), used


def _one_of(words: tuple[str, ...]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or _NEVER


def _slot(name: str) -> int:
    return int(name[2:-1]) - 1
