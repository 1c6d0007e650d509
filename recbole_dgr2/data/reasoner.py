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

N_SCORES = 10
"""A candidate's score is one digit, 0 to 9."""

_SCORE_QUANTILES = (0.15, 0.30, 0.45, 0.60, 0.72, 0.82, 0.90, 0.95, 0.98)


@dataclass(frozen=True)
class Reasoner:
    """A fitted conditional logit over F facts of `n_levels` levels, and the bounds that turn utilities into digits.

    weights: float64 [F, n_levels]; rank_weights: float64 [N], by the retriever's slot; score_edges: float64 [9].
    """

    weights: np.ndarray
    rank_weights: np.ndarray
    score_edges: np.ndarray

    def contributions(self, levels: np.ndarray) -> np.ndarray:
        """What each fact adds to a candidate's utility, float64 [..., N, F], for levels int64 [..., N, F]."""
        return self.weights[np.arange(levels.shape[-1]), levels]

    def utilities(self, levels: np.ndarray) -> np.ndarray:
        """Utility of each candidate, float64 [..., N]; N may be smaller than the N of the fit."""
        return self.contributions(levels).sum(axis=-1) + self.rank_weights[: levels.shape[-2]]

    def scores(self, levels: np.ndarray) -> np.ndarray:
        """Utility as a digit 0..9, int64 [..., N]; digits are finest among the best candidates."""
        return np.searchsorted(self.score_edges, self.utilities(levels), side="right")

    def order(self, levels: np.ndarray) -> np.ndarray:
        """Slots by falling score, equal scores in the retriever's order, int64 [..., N]."""
        return np.argsort(-self.scores(levels), axis=-1, kind="stable")

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {name: values.tolist() for name, values in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Reasoner:
        """The inverse of `to_dict`."""
        return cls(**{name: np.asarray(value, dtype=np.float64) for name, value in values.items()})


def fit_reasoner(levels: np.ndarray, slots: np.ndarray, n_levels: int, l2: float = 5.0) -> Reasoner:
    """Fit the logit by maximum likelihood with an L2 penalty.

    Args:
        levels: int64 [R, N, F], facts of the training lists.
        slots: int64 [R], 0-based slot of each list's target; N where it is not among the candidates (then the list
            only helps to place the score digits).
        n_levels: number of levels a fact can take.
        l2: weight of the penalty 0.5 * l2 * |w|^2.

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
    weights = _maximise(index, target, n_facts * n_levels + n_slots, l2)
    fitted = Reasoner(
        weights=weights[: n_facts * n_levels].reshape(n_facts, n_levels),
        rank_weights=weights[n_facts * n_levels :],
        score_edges=np.zeros(N_SCORES - 1),
    )
    edges = np.quantile(fitted.utilities(levels), _SCORE_QUANTILES)
    return Reasoner(fitted.weights, fitted.rank_weights, edges)


def _rank_column(n_slots: int, start: int) -> np.ndarray:
    return (start + np.arange(n_slots))[None, :, None]


def _maximise(index: np.ndarray, target: np.ndarray, size: int, l2: float) -> np.ndarray:
    """Weights float64 [size]; candidate (r, n) has the one-hot features `index[r, n]`."""
    rows = np.arange(len(target))
    observed = np.bincount(index[rows, target].ravel(), minlength=size)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        utility = weights[index].sum(axis=-1)
        utility = utility - utility.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(utility).sum(axis=1))
        probability = np.exp(utility - log_total[:, None])
        expected = np.bincount(index.ravel(), np.repeat(probability.ravel(), index.shape[-1]), minlength=size)
        value = (log_total - utility[rows, target]).sum() + 0.5 * l2 * weights @ weights
        return value, expected - observed + l2 * weights

    return minimize(loss, np.zeros(size), jac=True, method="L-BFGS-B").x
