"""Reasoning traces: the text that the AR teacher learns to write, grounded in the facts of the prompt.

The `evidence` source writes a trace from the reasoner's scores: the pattern of the history, a score for each
candidate, the best candidates with their strongest facts, then the ranked list as JSON: those best ones first, the
others in the retriever's order. How many are promoted is the template's choice (its `places`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import PromptTemplate, history_kinds, label
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.data.tasks import RankingTask

CITED = 3
"""Facts that are cited for a candidate."""


@dataclass(frozen=True)
class Trace:
    """A response in two parts: the reasoning, and the answer that holds the ranked list."""

    reasoning: str
    answer: str

    @property
    def text(self) -> str:
        return self.reasoning + self.answer


def write_evidence_trace(
    task: RankingTask, reasoner: Reasoner, template: PromptTemplate, item_text: ItemText
) -> Trace:
    """The trace of one task. Deterministic, and a function of what the prompt shows alone."""
    order = reasoner.order(task.levels, len(template.places)).tolist()
    scores = reasoner.scores(task.levels).tolist()
    cited = [_cite(task, slot, reasoner, template) for slot in order[: len(template.places)]]
    pattern = template.fill("pattern", kinds=" ".join(history_kinds(item_text, task.history)))
    strong = write_strong(template.places, order, scores, cited, template)
    return Trace(pattern + write_scores(scores, template) + strong, write_answer(order, cited[0], template))


def write_scores(scores: Sequence[int], template: PromptTemplate) -> str:
    """The score of every candidate, in the retriever's order."""
    each = (template.fill("score", label=label(slot), score=score) for slot, score in enumerate(scores))
    return template.fill("scores", scores="".join(each))


def write_strong(
    places: Sequence[str],
    order: Sequence[int],
    scores: Sequence[int],
    facts: Sequence[str],
    template: PromptTemplate,
) -> str:
    """One line for each of the best candidates: its place, its score, and the `facts` cited for it."""
    return "".join(
        template.fill("strong", place=place, score=scores[slot], label=label(slot), facts=cited)
        for place, slot, cited in zip(places, order, facts, strict=False)
    )


def write_answer(order: Sequence[int], facts: str, template: PromptTemplate) -> str:
    """The ranked list as JSON, explained by the `facts` of its first candidate."""
    ranking = ",".join(f'"{label(slot)}"' for slot in order)
    return template.fill("answer", label=label(order[0]), facts=facts, ranking=ranking)


def _cite(task: RankingTask, slot: int, reasoner: Reasoner, template: PromptTemplate) -> str:
    """The facts that give a candidate the most points, most first; equal points in the facts' order."""
    strongest = np.argsort(-reasoner.points(task.levels)[slot], kind="stable")[:CITED].tolist()
    return "".join(
        template.render_fact("cited_fact", task.fact_names[fact], task.levels[slot, fact])
        for fact in strongest
    )
