"""The floor: how well the retriever's own order does on hits, phase by phase.

Training lists teach a re-ranker; test lists judge it. Where the floor on one is outside the intervals of the other, the
lists are not alike, most often because the retriever of the training lists has seen their targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbole_dgr2.report.evaluation import hit_view
from recbole_dgr2.report.significance import Interval

FLOOR_METRICS = ("recall@1", "recall@3", "ndcg@3")
LEAKY_NOTE = "leaky: the retriever of the training lists has seen their targets; for comparison only"


@dataclass(frozen=True)
class Floor:
    """The retriever's own order on the lists of one phase under one candidate split.

    metrics, ci95: over hits, FLOOR_METRICS that N allows; empty without hits. The intervals take lists as independent.
    """

    split: str
    phase: str
    lists: int
    hits: int
    metrics: dict[str, float]
    ci95: dict[str, Interval]

    @property
    def hit_share(self) -> float:
        """Share of lists whose target is a candidate."""
        return self.hits / self.lists if self.lists else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for report.json."""
        intervals = {name: list(ends) for name, ends in self.ci95.items()}
        return {**vars(self), "hit_share": self.hit_share, "ci95": intervals}


def floor_of(names: tuple[str, str], slots: np.ndarray, n: int, samples: int, seed: int) -> Floor:
    """The floor of lists whose targets are in `slots`, int64 [R], n where a target is no candidate.

    Args:
        names: candidate split and phase.
        n: N, candidates a list.
        samples, seed: of the bootstrap.
    """
    ranks = slots[slots < n]
    metrics, intervals = hit_view(ranks, n, samples, seed)
    kept = [name for name in FLOOR_METRICS if name in metrics]
    return Floor(
        *names,
        lists=len(slots),
        hits=len(ranks),
        metrics={name: metrics[name] for name in kept},
        ci95={name: intervals[name] for name in kept},
    )


def agree(first: Floor, second: Floor) -> bool | None:
    """Whether the 95 % intervals of every metric overlap; None where one has no hits."""
    if not first.hits or not second.hits:
        return None
    return all(
        first.ci95[name][0] <= second.ci95[name][1] and second.ci95[name][0] <= first.ci95[name][1]
        for name in first.metrics
    )


def floor_cells(floors: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The floors of a report as cells of a table, the header first."""
    cells = [["split", "lists", "number", "hits", "hit share", *FLOOR_METRICS]]
    for floor in floors:
        numbers = [str(floor["lists"]), str(floor["hits"]), f"{floor['hit_share']:.4f}"]
        cells.append(
            [floor["split"], floor["phase"], *numbers, *(_cell(floor, name) for name in FLOOR_METRICS)]
        )
    return cells


def _cell(floor: dict[str, Any], name: str) -> str:
    if name not in floor["metrics"]:
        return "-"
    low, high = (f"{end:.3f}".removeprefix("0") for end in floor["ci95"][name])
    return f"{floor['metrics'][name]:.4f} ({low}-{high})"
