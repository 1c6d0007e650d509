"""One panel for every re-ranker: hits alone give the all-users metrics, validity comes from the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.ranking import Ranking
from recbole_dgr2.data.sequences import Rows
from recbole_dgr2.report.assessment import Panel, assess_reranker, assess_retriever, draw_sample
from recbole_dgr2.report.evaluation import mean_metrics

ROWS, N, WIDTH = 60, 6, 10


def make_panel(seed: int = 0, fewer: bool = True) -> Panel:
    """60 users, lists of 10 of 15 items, the first 6 are candidates; some users have fewer, one none."""
    rng = np.random.default_rng(seed)
    lists = np.stack([rng.permutation(np.arange(1, 16))[:WIDTH] for _ in range(ROWS)])
    targets = rng.integers(1, 16, size=ROWS)
    if fewer:
        for row, count in ((3, 4), (4, 1), (5, 0)):
            lists[row, count:] = 0
    numbers = np.arange(ROWS)
    ids = lists[:, :N]
    found = Candidates(Rows(numbers, numbers), ids, np.where(ids == 0, -np.inf, 1.0).astype(np.float32))

    def metrics(ranked: np.ndarray) -> dict[str, float]:
        match = ranked == targets[:, None]
        ranks = np.where(match.any(axis=1), match.argmax(axis=1), WIDTH)
        means = mean_metrics(ranks, WIDTH)
        return {("mrr@10" if name == "mrr" else name): value for name, value in means.items()}

    return Panel(found, targets, lists, draw_sample(found, 20, seed), metrics, 100, seed)


class Ranker:
    """Orders drawn by row; every third answer is not valid. Notes the rows it was asked for."""

    def __init__(self, panel: Panel) -> None:
        self.counts = panel.candidates.counts
        self.asked: list[int] = []

    def __call__(self, rows: np.ndarray) -> Sequence[Ranking]:
        self.asked += rows.tolist()
        return [self.ranking(row) for row in rows.tolist()]

    def ranking(self, row: int) -> Ranking:
        order = tuple(np.random.default_rng(row).permutation(self.counts[row]).tolist())
        return Ranking(order, row % 3 > 0, () if row % 3 else ("omission",))


def test_decoding_hits_alone_equals_decoding_everyone() -> None:
    panel = make_panel()
    some, everyone = Ranker(panel), Ranker(panel)
    row = assess_reranker("x", panel, some)
    filled = np.flatnonzero(panel.candidates.counts > 0)
    whole = assess_reranker("x", replace(panel, sample=filled), everyone)
    assert len(set(some.asked)) == len(some.asked) < len(everyone.asked)
    assert row.all_users == whole.all_users
    assert row.hits == whole.hits
    assert row.ci95 == whole.ci95
    # and both equal permuting every user's list, hit or not
    lists = panel.lists.copy()
    for user in filled.tolist():
        order = list(everyone.ranking(user).order)
        lists[user, : len(order)] = lists[user, order]
    expected = panel.metrics(lists)
    assert row.all_users == {name.replace("mrr@10", "mrr"): value for name, value in expected.items()}
    assert row.all_users != assess_retriever(panel).all_users


def test_validity_is_that_of_the_sample() -> None:
    panel = make_panel()
    row = assess_reranker("x", panel, Ranker(panel))
    assert row.validity is not None
    assert row.validity.answers == len(panel.sample) == 20
    wrong = sum(user % 3 == 0 for user in panel.sample.tolist())
    assert row.validity.valid == 20 - wrong
    assert row.validity.failures == {"duplicate": 0, "omission": wrong, "out_of_set": 0, "unparsed": 0}
    ranker, valid = Ranker(panel), [user for user in panel.sample.tolist() if user % 3]
    copied = [list(ranker.ranking(user).order) == sorted(ranker.ranking(user).order) for user in valid]
    assert row.copied == np.mean(copied)


def test_ranks_are_those_of_the_hits() -> None:
    panel = make_panel()
    row = assess_reranker("x", panel, Ranker(panel))
    assert len(row.ranks) == len(panel.hits)
    assert row.hits["recall@1"] == np.mean(np.array(row.ranks) == 0)
    assert assess_retriever(panel).ranks == tuple(panel.ranks[panel.hits].tolist())


def test_the_identity_is_the_retriever() -> None:
    panel = make_panel()
    counts = panel.candidates.counts

    def identity(rows: np.ndarray) -> list[Ranking]:
        return [Ranking(tuple(range(counts[row])), True, ()) for row in rows.tolist()]

    same, floor = assess_reranker("x", panel, identity), assess_retriever(panel)
    assert (same.all_users, same.hits, same.ci95) == (floor.all_users, floor.hits, floor.ci95)
    assert floor.validity is None


def test_no_hits() -> None:
    panel = replace(make_panel(), targets=np.full(ROWS, 99))
    row = assess_reranker("x", panel, Ranker(panel))
    assert (dict(row.hits), dict(row.ci95)) == ({}, {})
    assert row.all_users == assess_retriever(panel).all_users


def test_the_sample_has_candidates_and_is_drawn_by_seed() -> None:
    candidates = make_panel().candidates
    drawn = draw_sample(candidates, 20, 1)
    assert (np.diff(drawn) > 0).all()
    assert np.array_equal(drawn, draw_sample(candidates, 20, 1))
    assert not np.array_equal(drawn, draw_sample(candidates, 20, 2))
    assert draw_sample(candidates, 1000, 1).tolist() == [row for row in range(ROWS) if row != 5]
    with pytest.raises(ValueError, match="no answers to judge"):
        panel = replace(make_panel(), sample=np.array([], dtype=int))
        assess_reranker("x", panel, Ranker(panel))
