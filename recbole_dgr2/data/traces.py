"""Reasoning traces: the text that the AR teacher learns to write, grounded in the facts of the prompt.

The `evidence` source writes a trace from the reasoner's scores: the pattern of the history, a score for each
candidate, the best candidates with their two strongest facts, the weakest one, then the ranked list as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import PromptTemplate, history_kinds, label
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.data.tasks import RankingTask

CITED = 2
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
    order = reasoner.order(task.levels)
    scores = reasoner.scores(task.levels)
    contributions = reasoner.contributions(task.levels)
    relative = contributions - contributions.mean(axis=0)
    parts = [
        template.fill("pattern", kinds=" ".join(history_kinds(item_text, task.history))),
        template.fill(
            "scores",
            scores="".join(
                template.fill("score", label=label(n), score=score) for n, score in enumerate(scores)
            ),
        ),
    ]
    for place, slot in zip(template.places, order, strict=False):
        parts.append(
            template.fill(
                "strong", place=place, label=label(slot), facts=_cite(task, relative[slot], slot, template)
            )
        )
    last = order[-1]
    parts.append(template.fill("weak", label=label(last), facts=_cite(task, -relative[last], last, template)))
    answer = template.fill(
        "answer",
        label=label(order[0]),
        facts=_cite(task, relative[order[0]], order[0], template),
        ranking=",".join(f'"{label(slot)}"' for slot in order),
    )
    return Trace("".join(parts), answer)


def _cite(task: RankingTask, weight: np.ndarray, slot: int, template: PromptTemplate) -> str:
    """The facts of a candidate that weigh most, in the order of their weight; equal weights in the facts' order."""
    strongest = np.argsort(-np.round(weight, 9), kind="stable")[:CITED]
    return "".join(
        template.render_fact("cited_fact", task.fact_names[fact], task.levels[slot, fact])
        for fact in strongest
    )
