"""Drills: made-up scores whose answer follows from the scores, in the very format of a trace."""

from __future__ import annotations

import numpy as np

from recbole_dgr2.data.drills import write_drills
from recbole_dgr2.data.prompt import label
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.data.reasoner import promote
from recbole_dgr2.model.backbone import train_tokenizer
from tests.reranking import template

SCORES = np.array([[3, 0, 5, 5], [1, 1, 0, 2]])
TOKENIZER = train_tokenizer(["rank:scores <c1>=3 first <c1>\n"], 400, [label(slot) for slot in range(4)])


def test_the_answer_is_the_order_of_the_scores_in_the_prompt() -> None:
    for drill in write_drills(SCORES, template(), TOKENIZER, 20, seed=1):
        prompt, response = TOKENIZER.decode(drill.prompt_ids), TOKENIZER.decode(drill.response_ids[:-1])
        shown = [int(part.split()[0]) for part in prompt.split("=")[1:]]
        assert sorted(shown) in SCORES.tolist() or sorted(shown) in np.sort(SCORES).tolist()
        ranking = parse_ranking(response, 4, finished=True)
        assert ranking.valid
        assert list(ranking.order) == promote(np.array(shown), 2).tolist()
        assert drill.response_ids[-1] == TOKENIZER.eos_token_id
        assert TOKENIZER.decode(drill.response_ids[drill.answer_start :]).startswith("</think>")


def test_drills_are_reproducible_and_their_keys_differ_from_every_list() -> None:
    drills = write_drills(SCORES, template(), TOKENIZER, 5, seed=3)
    assert drills == write_drills(SCORES, template(), TOKENIZER, 5, seed=3)
    assert drills != write_drills(SCORES, template(), TOKENIZER, 5, seed=4)
    assert len({drill.key for drill in drills}) == 5
    assert min(drill.key for drill in drills) >= 2**62


def test_no_drills() -> None:
    assert write_drills(SCORES, template(), TOKENIZER, 0, seed=1) == []
