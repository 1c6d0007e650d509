"""Metrics of re-ranked candidates, their uncertainty, and the validity of raw answers.

Two views are always kept apart: *all users* (RecBole's own evaluator gives those numbers) and *hits*, the H
users whose target is among the N candidates, computed here from the 0-based rank of the target. With one
relevant item a user, RecBole's formulas are `recall@k = [rank < k]`, `ndcg@k = [rank < k] / log2(rank + 2)`
(the ideal DCG is 1) and `mrr@k = [rank < k] / (rank + 1)`. `mrr` without a cutoff means MRR@10 in both views.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from recbole_dgr2.report.significance import (
    FloatArray,
    Interval,
    bootstrap_intervals,
    exact_mean,
    wilson_interval,
)

IntArray = npt.NDArray[np.int64]

RECALL_CUTOFFS = (1, 3, 5, 10)
NDCG_CUTOFFS = (3, 5, 10)
MRR_CUTOFF = 10
METRICS = (*(f"recall@{k}" for k in RECALL_CUTOFFS), *(f"ndcg@{k}" for k in NDCG_CUTOFFS), "mrr")
FAILURES = ("duplicate", "omission", "out_of_set", "unparsed")


class RankingLike(Protocol):
    """A parsed answer: a permutation of the candidate slots and what was wrong with the raw text."""

    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def valid(self) -> bool: ...
    @property
    def failures(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Validity:
    """Raw answers before any repair: how many, how many were valid, in how many each failure occurred."""

    answers: int
    valid: int
    failures: Mapping[str, int]

    @property
    def rate(self) -> float:
        """Share of raw answers that are valid."""
        return self.valid / self.answers

    @property
    def interval(self) -> Interval:
        """Wilson 95 % interval of the rate."""
        return wilson_interval(self.valid, self.answers)


def rank_after(rank_before: npt.ArrayLike, orders: Sequence[Sequence[int]] | IntArray) -> IntArray:
    """Rank of the target in the new order, 0-based, int64 [H].

    Args:
        rank_before: slot of the target in the retriever's order, [H].
        orders: per hit user a permutation of its candidate slots, best first; lengths may differ between
            users.

    Raises:
        ValueError: counts differ, an order is no permutation, or a target is not among the user's candidates.
    """
    before = _ranks(rank_before)
    if len(before) != len(orders):
        raise ValueError(f"{len(orders)} orders for {len(before)} hit users: give one order a user")
    lengths = np.fromiter((len(order) for order in orders), dtype=np.int64, count=len(before))
    result = np.empty_like(before)
    for n in np.unique(lengths):
        rows = np.flatnonzero(lengths == n)
        block = np.asarray([orders[row] for row in rows.tolist()], dtype=np.int64)
        position = np.argsort(block, axis=1, kind="stable")
        bad = np.flatnonzero((np.take_along_axis(block, position, axis=1) != np.arange(n)).any(axis=1))
        if bad.size:
            order = block[bad[0]].tolist()
            raise ValueError(f"order {order} of hit user {rows[bad[0]]} is no permutation of 0..{n - 1}")
        absent = rows[before[rows] >= n]
        if absent.size:
            user, slot = absent[0], before[absent[0]]
            raise ValueError(f"hit user {user} has {n} candidates, but target slot {slot}: not a hit")
        result[rows] = position[np.arange(len(rows)), before[rows]]
    return result


def metric_names(n: int) -> tuple[str, ...]:
    """Metrics of the hits view for N = n candidates; cutoffs above n say nothing and are left out."""
    if n < 1:
        raise ValueError(f"n_candidates is {n}: at least 1 is needed")
    return tuple(name for name in METRICS if int(name.partition("@")[2] or 1) <= n)


def per_user_metrics(ranks: npt.ArrayLike, n: int) -> dict[str, FloatArray]:
    """Metric name -> value a user, float64 [R]. A target ranked n or worse (absent) scores 0."""
    table, clipped = _rank_table(n), np.minimum(_ranks(ranks), n)
    return {name: table[clipped, i] for i, name in enumerate(metric_names(n))}


def mean_metrics(ranks: npt.ArrayLike, n: int) -> dict[str, float]:
    """Metric name -> mean over users; empty without users, never NaN."""
    per_user = per_user_metrics(ranks, n)
    return {name: exact_mean(values) for name, values in per_user.items() if len(values)}


def hit_view(
    ranks: npt.ArrayLike, n: int, samples: int, seed: int
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Means over hits and their 95 % intervals, keyed by metric; both empty where no user is a hit."""
    means = mean_metrics(ranks, n)
    return means, bootstrap_intervals(per_user_metrics(ranks, n), samples, seed) if means else {}


def standard_metrics(recbole_result: Mapping[str, float]) -> dict[str, float]:
    """RecBole's results under the report's names (`mrr@10` becomes `mrr`); absent stays absent."""
    names = {name: f"mrr@{MRR_CUTOFF}" if name == "mrr" else name for name in METRICS}
    return {name: float(recbole_result[key]) for name, key in names.items() if key in recbole_result}


def count_validity(rankings: Sequence[RankingLike]) -> Validity:
    """Count valid raw answers and, a kind of failure, the answers that show it (one may show several)."""
    if not rankings:
        raise ValueError("no answers to judge: decode at least one request before counting validity")
    counts = Counter(kind for ranking in rankings for kind in set(ranking.failures))
    unknown = sorted(set(counts) - set(FAILURES))
    if unknown:
        raise ValueError(f"unknown failure kind {unknown[0]!r}: one of {', '.join(FAILURES)} is expected")
    valid = sum(bool(ranking.valid) for ranking in rankings)
    return Validity(len(rankings), valid, {kind: counts[kind] for kind in FAILURES})


def merge_hits(ranked: npt.ArrayLike, rows: npt.ArrayLike, orders: Sequence[Sequence[int]]) -> IntArray:
    """All users' ranked lists when only some rows were decoded: their heads are permuted, nothing else.

    Re-ranking moves no metric of a user without a hit (below cutoff k > N the tail is the retriever's own),
    so decoding the hits alone gives exactly the all-users metrics of decoding everyone.

    Args:
        ranked: the retriever's item ids, [R, W], best first, W >= the longest order.
        rows: decoded rows, [H], no row twice.
        orders: per decoded row a permutation of its first candidates; an order may be shorter than N.

    Returns:
        int64 [R, W], a copy.
    """
    result, index = np.array(ranked, dtype=np.int64), _ranks(rows)
    if len(index) != len(orders):
        raise ValueError(f"{len(orders)} orders for {len(index)} rows: give one order a row")
    if len(np.unique(index)) != len(index) or (len(index) and index.max() >= len(result)):
        raise ValueError(f"rows to merge must be distinct and below {len(result)}")
    for row, order in zip(index, orders, strict=True):
        if len(order) > result.shape[1] or sorted(order) != list(range(len(order))):
            raise ValueError(f"order {list(order)} of row {row} is no permutation of its first candidates")
        result[row, : len(order)] = result[row, list(order)]
    return result


def copy_share(rankings: Sequence[RankingLike]) -> float | None:
    """Share of valid answers that only repeat the input order; None without a valid one.

    Invalid answers are left out: repair fills them up in the retriever's order, which is no copying by the
    model.
    """
    copied = [
        tuple(ranking.order) == tuple(range(len(ranking.order))) for ranking in rankings if ranking.valid
    ]
    return sum(copied) / len(copied) if copied else None


def repetition(outputs: Sequence[str | Sequence[int]], n: int = 4) -> float:
    """Mean over outputs of the share of repeated n-grams, 1 - distinct / all (Welleck et al. 2020).

    Texts are cut into words and punctuation, token ids are taken as they are. An output of fewer than n units
    has no repetition: 0. (The paper calls it seq-rep-n.)
    """
    if not outputs:
        raise ValueError("no outputs to measure repetition on: give at least one")
    return float(np.mean([_repeated_share(output, n) for output in outputs]))


def _repeated_share(output: str | Sequence[int], n: int) -> float:
    units = re.findall(r"\w+|[^\w\s]", output) if isinstance(output, str) else output
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _rank_table(n: int) -> FloatArray:
    """Metric values by rank, [n + 1, M]; the last row is an absent target."""
    rank = np.arange(n + 1)
    table = np.empty((n + 1, len(metric_names(n))))
    for i, name in enumerate(metric_names(n)):
        kind, _, cutoff = name.partition("@")
        gain = {"recall": np.ones(n + 1), "ndcg": 1 / np.log2(rank + 2), "mrr": 1 / (rank + 1)}[kind]
        table[:, i] = np.where(rank < min(int(cutoff or MRR_CUTOFF), n), gain, 0.0)
    return table


def _ranks(ranks: npt.ArrayLike) -> IntArray:
    array = np.asarray(ranks)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise ValueError(
            f"ranks must be a list of whole numbers >= 0, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)
