"""Drills: lists of made-up scores to rank, without facts; what a model from scratch practises beside its lessons.

Ranking by scores that the model has just written (find the highest, name its candidate, put it first) is a skill of
its own, and the one that takes a small model longest. A drill is a fifth of a lesson's length and practises it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.reasoner import promote
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.traces import Cited, write_answer, write_scores, write_strong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST_KEY = 2**62
"""Above every key of a list."""


def write_drills(
    scores: np.ndarray, template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, count: int, seed: int
) -> list[Example]:
    """Drills whose scores are those of real lists in another order.

    Args:
        scores: int64 [R, N], scores of training lists.
        template: sections of the trace.
        tokenizer: gives the token ids; its EOS ends each response.
        count: number of drills.
        seed: decides which scores, in which order.
    """
    random = np.random.default_rng(seed)
    places = (*template.places, *template.drill_places)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    drills = []
    for number in range(count):
        row = random.permutation(scores[random.integers(len(scores))])
        scored = row.tolist()
        best = promote(row, len(row)).tolist()
        head = ids(write_strong(places, best, scored, [Cited()] * len(places), template))
        answer = ids(write_answer(promote(row, len(template.places)).tolist(), Cited(), template))
        prompt = ids(template.fill("closing") + write_scores(scored, template))
        response = (*head, *answer, int(tokenizer.eos_token_id))
        drills.append(Example(_FIRST_KEY + number, prompt, response, len(head)))
    return drills
