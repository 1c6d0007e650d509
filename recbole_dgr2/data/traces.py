"""Reasoning traces: the text that the AR teacher learns to write, grounded in the facts of the prompt.

The `evidence` source writes a trace from the reasoner's scores: the pattern of the history, the candidates that fit or
complement it (where the template asks for them), a score for each candidate, the best candidates with their strongest
facts, then the ranked list as JSON: those best ones first, the others in the retriever's order. How many are promoted
is the template's choice (its `places`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import history_kinds, label, plain
from recbole_dgr2.data.reasoner import Reasoner, promote
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import PromptTemplate

CITED = 3
"""Facts that are cited for a candidate."""

COMPLEMENTS = ("next", "together")
"""Facts that link a candidate to what the user already has: other users take the two together."""
NOBODY = "none"


@dataclass(frozen=True)
class Trace:
    """A response in two parts: the reasoning, and the answer that holds the ranked list."""

    reasoning: str
    answer: str

    @property
    def text(self) -> str:
        return self.reasoning + self.answer


@dataclass(frozen=True)
class Cited:
    """What a trace cites of a candidate: its semantic ID, where it has one, and its strongest facts in words."""

    sid: str = ""
    facts: str = ""


def write_evidence_trace(
    task: RankingTask,
    reasoner: Reasoner,
    template: PromptTemplate,
    item_text: ItemText,
    scores: np.ndarray | None = None,
) -> Trace:
    """The trace of one task, by the reasoner's scores or others, int64 [N].

    Deterministic, and with the reasoner's own scores a function of what the prompt shows alone.
    """
    given = reasoner.scores(task.levels) if scores is None else scores
    order = promote(given, len(template.places)).tolist()
    cited = [
        Cited(item_text.sid(task.candidates[slot]), _cite(task, slot, reasoner, template))
        for slot in order[: len(template.places)]
    ]
    pattern = _pattern(task, template, item_text)
    strong = write_strong(template.places, order, given.tolist(), cited, template)
    shown = write_scores(given.tolist(), template)
    return Trace(pattern + shown + strong, write_answer(order, cited[0], template))


def write_scores(scores: Sequence[int], template: PromptTemplate) -> str:
    """The score of every candidate, in the retriever's order."""
    each = (template.fill("score", label=label(slot), score=score) for slot, score in enumerate(scores))
    return template.fill("scores", scores="".join(each))


def write_strong(
    places: Sequence[str],
    order: Sequence[int],
    scores: Sequence[int],
    cited: Sequence[Cited],
    template: PromptTemplate,
) -> str:
    """One line for each of the best candidates: its place, its score, and what is cited for it."""
    return "".join(
        template.fill("strong", place=place, score=scores[slot], label=label(slot), **vars(each))
        for place, slot, each in zip(places, order, cited, strict=False)
    )


def write_answer(order: Sequence[int], cited: Cited, template: PromptTemplate) -> str:
    """The ranked list as JSON, explained by what is cited for its first candidate."""
    ranking = ",".join(f'"{label(slot)}"' for slot in order)
    return template.fill("answer", label=label(order[0]), ranking=ranking, **vars(cited))


def _pattern(task: RankingTask, template: PromptTemplate, item_text: ItemText) -> str:
    """What the history is about, which candidates are of its kind, and which ones go with its items."""
    kinds = history_kinds(item_text, task.history)
    linking = [fact for fact, name in enumerate(task.fact_names) if name in COMPLEMENTS]
    same = [set(kinds) & set(map(plain, item_text.categories[item])) for item in task.candidates]
    linked = [bool((levels > 0).any()) for levels in task.levels[:, linking]]
    return template.fill("pattern", kinds=template.separator.join(kinds)) + template.fill(
        "category", same=_labels(same), linked=_labels(linked)
    )


def _labels(marks: Sequence[object]) -> str:
    """Labels of the candidates that have a mark."""
    return "".join(label(slot) for slot, mark in enumerate(marks) if mark) or NOBODY


def _cite(task: RankingTask, slot: int, reasoner: Reasoner, template: PromptTemplate) -> str:
    """The facts that give a candidate the most points, most first; equal points in the facts' order."""
    strongest = np.argsort(-reasoner.points(task.levels)[slot], kind="stable")[:CITED].tolist()
    return "".join(
        template.render_fact("cited_fact", task.fact_names[fact], task.levels[slot, fact])
        for fact in strongest
    )
