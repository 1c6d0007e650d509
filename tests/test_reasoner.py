"""The conditional logit: its gradient, known weights, and orders that are permutations."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult

from recbole_dgr2.data import reasoner as module
from recbole_dgr2.data.reasoner import POINTS_PER_UNIT, Reasoner, fit_reasoner
from tests.reranking import reasoner

WEIGHTS = np.array([[-1.0, 0.0, 1.0], [0.8, 0.0, -0.8]])
RANKS = np.array([0.6, 0.2, -0.2, -0.6])


def lists(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Fact levels [rows, 4, 2] and targets drawn from the logit with WEIGHTS and RANKS."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 3, size=(rows, 4, 2))
    utility = WEIGHTS[np.arange(2), levels].sum(axis=-1) + RANKS + rng.gumbel(size=(rows, 4))
    return levels, utility.argmax(axis=1)


def test_gradient_equals_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check(loss: object, start: np.ndarray, **options: object) -> OptimizeResult:
        at = np.random.default_rng(1).normal(size=start.shape)
        _, gradient = loss(at)  # type: ignore[operator]
        for k in range(len(at)):
            step = np.zeros_like(at)
            step[k] = 1e-5
            rise = loss(at + step)[0] - loss(at - step)[0]  # type: ignore[operator]
            checked.append(abs(rise / 2e-5 - gradient[k]) < 1e-4)
        return OptimizeResult(x=at)

    monkeypatch.setattr(module, "minimize", check)
    fit_reasoner(*lists(30), n_levels=3)
    assert len(checked) == 2 * 3 + 4
    assert all(checked)


def test_known_weights_are_found() -> None:
    """Up to a constant for each fact, which no list can tell."""
    found = fit_reasoner(*lists(20_000), n_levels=3, l2=0.1)
    assert np.allclose(found.weights - found.weights.mean(axis=1, keepdims=True), WEIGHTS, atol=0.06)
    assert np.allclose(found.rank_weights - found.rank_weights.mean(), RANKS, atol=0.06)


def test_it_beats_the_order_it_was_given() -> None:
    levels, slots = lists(2000)
    order = fit_reasoner(levels, slots, n_levels=3).order(levels, 4)
    assert (order[:, 0] == slots).mean() > (slots == 0).mean() + 0.1


def test_lists_without_a_hit_are_left_out() -> None:
    levels, slots = lists(300)
    more = np.concatenate([levels, levels[:50]])
    found = fit_reasoner(more, np.concatenate([slots, np.full(50, 4)]), n_levels=3)
    alone = fit_reasoner(levels, slots, n_levels=3)
    assert np.array_equal(found.weights, alone.weights)
    assert np.array_equal(found.rank_weights, alone.rank_weights)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 5))
def test_orders_are_permutations_that_promote_the_highest_scores(seed: int, n: int, promoted: int) -> None:
    levels = np.random.default_rng(seed).integers(0, 3, size=(5, n, 2))
    fitted = fit_reasoner(*lists(200), n_levels=3)
    scores, order = fitted.scores(levels), fitted.order(levels, promoted)
    assert scores.min() >= 0
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(n), (5, 1)))
    for row in range(5):
        best = sorted(range(n), key=lambda slot: -scores[row, slot])[:promoted]  # stable
        assert order[row].tolist() == [*best, *(slot for slot in range(n) if slot not in best)]
        assert np.array_equal(fitted.order(levels[row], promoted), order[row])


def test_scores_are_rounded_utilities() -> None:
    """The least of each fact and of the slots is 0, and each of them rounds to half a point at most."""
    fitted = fit_reasoner(*lists(500), n_levels=3)
    assert fitted.weights.min(axis=1).tolist() == [0, 0]
    assert fitted.rank_weights.min() == 0
    levels, _ = lists(50, seed=2)
    exact = fitted.utilities(levels) * POINTS_PER_UNIT
    assert np.abs(fitted.scores(levels) - exact).max() <= 3 / 2
    slots = np.rint(fitted.rank_weights * POINTS_PER_UNIT)
    assert np.array_equal(fitted.scores(levels), fitted.points(levels).sum(axis=-1) + slots)


def test_finer_points_come_closer_to_the_logit() -> None:
    """The order of the scores goes to that of the utilities; three points are the default."""
    fitted = fit_reasoner(*lists(500), n_levels=3)
    assert fitted.points_per_unit == POINTS_PER_UNIT
    fine = replace(fitted, points_per_unit=1e6)
    levels, _ = lists(50, seed=2)
    exact = np.argsort(-fitted.utilities(levels), axis=-1, kind="stable")
    assert np.array_equal(fine.order(levels, 4), exact)
    assert not np.array_equal(replace(fitted, points_per_unit=0.5).order(levels, 4), exact)
    assert np.abs(fine.scores(levels) - 1e6 * fitted.utilities(levels)).max() <= 3 / 2


def test_equal_candidates_keep_the_retrievers_order() -> None:
    assert reasoner().order(np.ones((3, 2), dtype=int), 3).tolist() == [0, 1, 2]
    assert reasoner().order(np.array([[0, 1], [2, 0], [0, 1]]), 3).tolist() == [1, 0, 2]
    assert reasoner().order(np.array([[0, 0], [1, 0], [2, 0]]), 1).tolist() == [2, 0, 1]


def test_no_facts_at_all() -> None:
    fitted = fit_reasoner(np.zeros((40, 4, 0), dtype=int), np.arange(40) % 2, n_levels=3)
    assert fitted.points(np.zeros((2, 4, 0), dtype=int)).shape == (2, 4, 0)
    assert sorted(fitted.order(np.zeros((4, 0), dtype=int), 2).tolist()) == [0, 1, 2, 3]


def test_round_trip_through_json() -> None:
    fitted = fit_reasoner(*lists(100), n_levels=3)
    again = Reasoner.from_dict(json.loads(json.dumps(fitted.to_dict())))
    for name, value in vars(fitted).items():
        assert np.array_equal(getattr(again, name), value)


def test_a_reasoner_without_its_weights_is_refused() -> None:
    values = fit_reasoner(*lists(100), n_levels=3).to_dict()
    del values["points_per_unit"]
    assert Reasoner.from_dict(values).points_per_unit == POINTS_PER_UNIT
    del values["weights"]
    with pytest.raises(ValueError, match="lacks 'weights'"):
        Reasoner.from_dict(values)


def test_no_hit_is_an_error() -> None:
    levels, _ = lists(6)
    with pytest.raises(ValueError, match="none of 6 training lists has its target among the 4 candidates"):
        fit_reasoner(levels, np.full(6, 4), n_levels=3)


def test_an_empty_slot_is_no_alternative() -> None:
    """Lists of 3 in 6 slots, target uniform among the three: facts of padding and slots say nothing."""
    rng = np.random.default_rng(0)
    levels = np.concatenate([rng.integers(1, 3, (3_000, 3, 1)), np.zeros((3_000, 3, 1), dtype=int)], axis=1)
    filled = np.repeat([[True] * 3 + [False] * 3], 3_000, axis=0)
    found = fit_reasoner(levels, rng.integers(0, 3, 3_000), n_levels=3, filled=filled)
    assert np.ptp(found.weights[0, 1:]) < 0.15
    assert np.ptp(found.rank_weights[:3]) < 0.15
    short = fit_reasoner(levels[:, :3], rng.integers(0, 3, 3_000), n_levels=3)
    assert np.allclose(found.weights, short.weights, atol=0.2)
