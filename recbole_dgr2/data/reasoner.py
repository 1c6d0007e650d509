"""The embedded reasoner: weighs a candidate's facts, scores it and orders the list, with no language model.

A conditional logit (McFadden 1974) over the levels of the facts and the retriever's rank, fitted on training lists
whose target is among the candidates. It is the source of the reasoning traces that the AR teacher learns, and a
second-stage baseline in its own right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

POINTS_PER_UNIT = 3.0
"""Points for one unit of utility (a factor e in the odds), unless told otherwise. Two are too few: ties are harder to
learn than sums. The more there are, the closer the scores are to the logit, and the more sums have to be learnt."""


@dataclass(frozen=True)
class Reasoner:
    """A conditional logit over F facts of `n_levels` levels, and the scorecard that is its rounded form.

    weights: float64 [F, n_levels]; rank_weights: float64 [N], by the retriever's slot. Both are shifted so that the
    least of each fact, and of the slots, is 0. points_per_unit: points for one unit of utility.
    """

    weights: np.ndarray
    rank_weights: np.ndarray
    points_per_unit: float = POINTS_PER_UNIT

    def points(self, levels: np.ndarray) -> np.ndarray:
        """Whole points that each fact gives a candidate, int64 [..., N, F], for levels int64 [..., N, F]."""
        table = np.rint(self.weights * self.points_per_unit).astype(np.int64)
        return table[np.arange(levels.shape[-1]), levels]

    def utilities(self, levels: np.ndarray) -> np.ndarray:
        """Utility of each candidate in the logit, float64 [..., N]; N may be smaller than the N of the fit."""
        added = self.weights[np.arange(levels.shape[-1]), levels].sum(axis=-1)
        return added + self.rank_weights[: levels.shape[-2]]

    def scores(self, levels: np.ndarray) -> np.ndarray:
        """Score of each candidate, int64 [..., N]: its facts' points and its slot's, all whole numbers.

        A sum of small whole numbers is a task that a small model can learn exactly.
        """
        slots = np.rint(self.rank_weights * self.points_per_unit).astype(np.int64)
        return self.points(levels).sum(axis=-1) + slots[: levels.shape[-2]]

    def strongest_facts(self, levels: np.ndarray, most: int) -> np.ndarray:
        """int64 [<= most]: the facts (0..F-1) that vary most in what they add to candidates int64 [M, F]."""
        spread = self.weights[np.arange(levels.shape[-1]), levels].std(axis=0)
        return np.argsort(-spread, kind="stable")[:most]

    def order(self, levels: np.ndarray, promoted: int) -> np.ndarray:
        """Slots in the new order, int64 [..., N].

        The `promoted` candidates of the highest scores come first, by falling score; equal scores, and all other
        candidates, stay in the retriever's order. With `promoted` >= N the whole list is sorted by score.
        """
        return promote(self.scores(levels), promoted)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists of numbers, for JSON."""
        lists = {"weights": self.weights.tolist(), "rank_weights": self.rank_weights.tolist()}
        return {**lists, "points_per_unit": self.points_per_unit}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Reasoner:
        """The inverse of `to_dict`; POINTS_PER_UNIT where the points are not told.

        Raises:
            ValueError: a value is missing or no number.
        """
        missing = [name for name in ("weights", "rank_weights") if name not in values]
        if missing:
            raise ValueError(f"the reasoner lacks {missing[0]!r}")
        weights, by_slot = (
            np.asarray(values[name], dtype=np.float64) for name in ("weights", "rank_weights")
        )
        return cls(weights, by_slot, float(values.get("points_per_unit", POINTS_PER_UNIT)))


def promote(scores: np.ndarray, promoted: int) -> np.ndarray:
    """Slots with the `promoted` highest scores first, ties and all others in their old order, int64 [..., N]."""
    places = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    return np.argsort(np.minimum(places, promoted), axis=-1, kind="stable")


def fit_reasoner(
    levels: np.ndarray,
    slots: np.ndarray,
    n_levels: int,
    l2: float = 5.0,
    filled: np.ndarray | None = None,
) -> Reasoner:
    """Fit the logit by maximum likelihood with an L2 penalty.

    Args:
        levels: int64 [R, N, F], facts of the training lists.
        slots: int64 [R], 0-based slot of each list's target; lists with N (target not among the candidates) are
            left out.
        n_levels: number of levels a fact can take.
        l2: weight of the penalty 0.5 * l2 * |w|^2.
        filled: bool [R, N], slots that hold a candidate; None: all. An empty slot is no alternative.

    Raises:
        ValueError: no list has its target among the candidates.
    """
    n_lists, n_slots, n_facts = levels.shape
    hits = slots < n_slots
    if not hits.any():
        raise ValueError(
            f"none of {n_lists} training lists has its target among the {n_slots} candidates: "
            "raise n_candidates or train_last_m, or use a stronger retriever"
        )
    chosen, target = levels[hits], slots[hits]
    index = np.concatenate(
        [
            chosen + np.arange(n_facts) * n_levels,
            np.broadcast_to(_rank_column(n_slots, n_facts * n_levels), (len(chosen), n_slots, 1)),
        ],
        axis=-1,
    )
    open_slots = np.ones(chosen.shape[:2], dtype=bool) if filled is None else filled[hits]
    weights = _maximise((index, open_slots), target, n_facts * n_levels + n_slots, l2)
    by_level = weights[: n_facts * n_levels].reshape(n_facts, n_levels)
    by_slot = weights[n_facts * n_levels :]
    return Reasoner(by_level - by_level.min(axis=1, keepdims=True), by_slot - by_slot.min())


def _rank_column(n_slots: int, start: int) -> np.ndarray:
    return (start + np.arange(n_slots))[None, :, None]


def _maximise(
    candidates: tuple[np.ndarray, np.ndarray], target: np.ndarray, size: int, l2: float
) -> np.ndarray:
    """Weights float64 [size]; candidate (r, n) has the one-hot features `index[r, n]`, if its slot is filled."""
    index, filled = candidates
    rows = np.arange(len(target))
    observed = np.bincount(index[rows, target].ravel(), minlength=size)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        utility = np.where(filled, weights[index].sum(axis=-1), -np.inf)
        utility = utility - utility.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(utility).sum(axis=1))
        probability = np.exp(utility - log_total[:, None])
        expected = np.bincount(index.ravel(), np.repeat(probability.ravel(), index.shape[-1]), minlength=size)
        value = (log_total - utility[rows, target]).sum() + 0.5 * l2 * weights @ weights
        return value, expected - observed + l2 * weights

    return minimize(loss, np.zeros(size), jac=True, method="L-BFGS-B").x
