"""Second stages that a user would pick instead of a language model, on the same candidates and facts.

`conditional_logit` orders by the utilities of the embedded reasoner; `lambdarank` is LightGBM's LambdaRank (Burges
2010) on the facts as numbers. Both are trained on training hits; how strongly, is chosen on validation hits.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbole_dgr2.data.evidence import FACTS, FactScale, fit_fact_scale
from recbole_dgr2.data.reasoner import Reasoner, fit_reasoner
from recbole_dgr2.data.sequences import Phase
from recbole_dgr2.report.assessment import Panel
from recbole_dgr2.report.evaluation import merge_hits, rank_after, standard_metrics
from recbole_dgr2.report.tables import Row

PENALTIES = (0.5, 2.0, 5.0, 20.0, 100.0)
"""L2 penalties that the conditional logit chooses from."""
MOST_TREES = 500
PATIENCE = 40
"""Trees without a gain on validation lists before LambdaRank stops."""
_TREES: dict[str, Any] = {
    "objective": "lambdarank",
    "metric": "ndcg",
    "eval_at": [3],
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 50,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankingData:
    """Lists of one phase as a second stage sees them.

    facts: float64 [R, N, F]; ids: int64 [R, N], 0 where a slot is empty; slots: int64 [R], the target's, N without.
    """

    facts: np.ndarray
    ids: np.ndarray
    slots: np.ndarray

    def hits(self) -> RankingData:
        """The lists whose target is a candidate."""
        return self.take(np.flatnonzero(self.slots < self.ids.shape[1]))

    def take(self, rows: np.ndarray) -> RankingData:
        """Some of the lists."""
        return RankingData(self.facts[rows], self.ids[rows], self.slots[rows])

    def orders(self, values: np.ndarray) -> np.ndarray:
        """Slots by falling value [R, N], equal ones in the retriever's order, empty slots last, int64 [R, N]."""
        return np.argsort(-np.where(self.ids == 0, -np.inf, values), axis=1, kind="stable")

    def gain(self, values: np.ndarray) -> float:
        """Mean NDCG@3 (NDCG over all of a shorter list) of the lists ordered by `values`; for choosing a model."""
        ranks = rank_after(self.slots, self.orders(values))
        return float(np.where(ranks < 3, 1 / np.log2(ranks + 2), 0.0).mean())


@dataclass(frozen=True)
class Logit:
    """A fitted conditional logit over all facts, and the penalty it was fitted with."""

    scale: FactScale
    reasoner: Reasoner
    l2: float

    def utilities(self, facts: np.ndarray) -> np.ndarray:
        """Utility of each candidate, float64 [R, N]."""
        return self.reasoner.utilities(self.scale.levels(facts))


def fit_conditional_logit(phases: Mapping[Phase, RankingData], fact_levels: int) -> Logit | None:
    """The logit with the penalty that is best on validation hits; None without training hits."""
    train, valid = phases["train"].hits(), phases["valid"].hits()
    if not len(train.slots):
        return None
    scale = fit_fact_scale(phases["train"].facts[phases["train"].ids != 0], fact_levels)
    levels, filled = scale.levels(train.facts), train.ids != 0
    fits = [
        Logit(scale, fit_reasoner(levels, train.slots, fact_levels, l2=penalty, filled=filled), penalty)
        for penalty in PENALTIES
    ]
    if not len(valid.slots):
        return fits[len(PENALTIES) // 2]
    return max(fits, key=lambda fit: valid.gain(fit.utilities(valid.facts)))


def fit_lambdarank(phases: Mapping[Phase, RankingData], seed: int) -> tuple[np.ndarray, int] | None:
    """Scores of the test lists, float64 [R, N], and the number of trees; None without training hits or LightGBM."""
    if importlib.util.find_spec("lightgbm") is None:
        logger.info("lambdarank is left out: pip install 'recbole_dgr2[baselines]' adds LightGBM")
        return None
    import lightgbm

    train, valid, test = phases["train"].hits(), phases["valid"].hits(), phases["test"]
    if not len(train.slots):
        return None
    sets = [_lightgbm_set(lightgbm, part) for part in (train, valid) if len(part.slots)]
    booster = lightgbm.train(
        {**_TREES, "seed": seed},
        sets[0],
        num_boost_round=MOST_TREES if len(sets) > 1 else PATIENCE,
        valid_sets=sets[1:],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)] if len(sets) > 1 else [],
    )
    values = booster.predict(_features(test).reshape(-1, len(FACTS) + 1), num_threads=_TREES["num_threads"])
    return np.asarray(values).reshape(test.ids.shape), int(booster.best_iteration or PATIENCE)


def _features(data: RankingData) -> np.ndarray:
    """The facts and the retriever's slot, float64 [R, N, F + 1]."""
    slots = np.broadcast_to(
        np.arange(data.ids.shape[1], dtype=np.float64)[None, :, None], (*data.ids.shape, 1)
    )
    return np.concatenate([data.facts, slots], axis=-1)


def _lightgbm_set(lightgbm: Any, data: RankingData) -> Any:
    filled = data.ids != 0
    label = (np.arange(data.ids.shape[1]) == data.slots[:, None]).astype(int)
    return lightgbm.Dataset(_features(data)[filled], label[filled], group=filled.sum(axis=1))


def assess_values(name: str, panel: Panel, test: RankingData, values: np.ndarray) -> Row:
    """The report's row of a system that orders test candidates by values [R, N]."""
    orders = test.orders(values)[panel.hits]
    ranks = rank_after(panel.ranks[panel.hits], orders)
    means, intervals = panel.hit_metrics(ranks)
    merged = merge_hits(panel.lists, panel.hits, orders.tolist())
    everyone = standard_metrics(panel.metrics(merged))
    return Row(name, everyone, means, intervals, ranks=tuple(ranks.tolist()))


def assess_baselines(
    panel: Panel, phases: Mapping[Phase, RankingData], fact_levels: int
) -> tuple[list[Row], tuple[FactScale, Reasoner] | None]:
    """Rows of the baselines that could be fitted, and the logit."""
    test, values = phases["test"], dict[str, np.ndarray]()
    logit, trees = fit_conditional_logit(phases, fact_levels), fit_lambdarank(phases, panel.seed)
    if logit is not None:
        logger.info("conditional_logit: penalty %g, chosen on validation hits", logit.l2)
        values["conditional_logit"] = logit.utilities(test.facts)
    if trees is not None:
        logger.info("lambdarank: %d trees, chosen on validation hits", trees[1])
        values["lambdarank"] = trees[0]
    rows = [assess_values(name, panel, test, scores) for name, scores in values.items()]
    return rows, (logit.scale, logit.reasoner) if logit else None
