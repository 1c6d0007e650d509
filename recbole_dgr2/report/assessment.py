"""Assessment of one re-ranker on one panel of users: accuracy in both views, and validity of its raw answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.ranking import Ranking
from recbole_dgr2.report.evaluation import (
    copy_share,
    count_validity,
    hit_view,
    merge_hits,
    rank_after,
    standard_metrics,
)
from recbole_dgr2.report.significance import Interval
from recbole_dgr2.report.tables import Row

RankRows = Callable[[np.ndarray], Sequence[Ranking]]
"""Ranks the rows of the panel with the given indices."""


@dataclass(frozen=True)
class Panel:
    """The users that every row of a report is assessed on.

    Re-ranking moves metrics of hits only, so the hits alone are decoded for accuracy; validity is read off a random
    sample of all users, hit or not.

    candidates: R rows; targets: int64 [R]; lists: int64 [R, W >= max(topk)], the retriever's order;
    sample: int64 [S], rows whose raw answers are judged; metrics: RecBole's evaluator on lists [R, W].
    """

    candidates: Candidates
    targets: np.ndarray
    lists: np.ndarray
    sample: np.ndarray
    metrics: Callable[[np.ndarray], dict[str, float]]
    bootstrap_samples: int
    seed: int

    @property
    def ranks(self) -> np.ndarray:
        """int64 [R]: slot of each target in the retriever's order, N where it is no candidate."""
        return self.candidates.rank_of(self.targets)

    @property
    def hits(self) -> np.ndarray:
        """int64 [H]: rows whose target is among the candidates."""
        return np.flatnonzero(self.ranks < self.candidates.n)

    def hit_metrics(self, ranks: np.ndarray) -> tuple[dict[str, float], dict[str, Interval]]:
        """Means and intervals over hits, for their ranks int64 [H]."""
        return hit_view(ranks, self.candidates.n, self.bootstrap_samples, self.seed)


def draw_sample(candidates: Candidates, size: int, seed: int) -> np.ndarray:
    """int64 [<= size]: rows with candidates, drawn without replacement, in rising order."""
    filled = np.flatnonzero(candidates.counts > 0)
    drawn = np.random.default_rng(seed).permutation(filled)[:size]
    return np.sort(drawn)


def assess_retriever(panel: Panel) -> Row:
    """The retriever's own order."""
    ranks = panel.ranks[panel.hits]
    means, intervals = panel.hit_metrics(ranks)
    everyone = standard_metrics(panel.metrics(panel.lists))
    return Row("retriever", everyone, means, intervals, ranks=tuple(ranks.tolist()))


def assess_reranker(name: str, panel: Panel, rank_rows: RankRows) -> Row:
    """A re-ranker; each row of the panel that is needed is ranked once."""
    rows = np.union1d(panel.hits, panel.sample)
    rankings = dict(zip(rows.tolist(), rank_rows(rows), strict=True))
    orders = [rankings[row].order for row in panel.hits.tolist()]
    ranks = rank_after(panel.ranks[panel.hits], orders)
    means, intervals = panel.hit_metrics(ranks)
    merged = merge_hits(panel.lists, panel.hits, orders)
    sampled = [rankings[row] for row in panel.sample.tolist()]
    return Row(
        name,
        standard_metrics(panel.metrics(merged)),
        means,
        intervals,
        count_validity(sampled),
        ranks=tuple(ranks.tolist()),
        copied=copy_share(sampled),
    )
