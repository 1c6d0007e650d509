"""Paired comparisons of systems on the same users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbole_dgr2.report.evaluation import per_user_metrics
from recbole_dgr2.report.significance import paired_test

COMPARED = ("recall@1", "recall@3", "ndcg@3")
PLAIN_SYSTEMS = ("retriever", "conditional_logit", "lambdarank")
"""Systems without a language model."""


@dataclass(frozen=True)
class Resampling:
    """How differences are tested on lists of n candidates: bootstrap resamples and their seed."""

    n: int
    samples: int
    seed: int


def compare_all(
    ranks: Mapping[str, np.ndarray], teachers: Mapping[str, str], resampling: Resampling
) -> list[dict[str, Any]]:
    """Every system against the retriever, language models against the baselines, students against their teacher.

    Args:
        ranks: of the targets of the same users by system, int64 [R] each; the retriever's and the baselines' under
            their names. The order of the systems is that of the entries.
        teachers: autoregressive stage that a student grew out of, by student; one without ranks is left out.
        resampling: N and the bootstrap.
    """
    entries = []
    for name in ranks:
        others = ["retriever"] if name != "retriever" else []
        if name not in PLAIN_SYSTEMS:
            others += [*PLAIN_SYSTEMS[1:], *([teachers[name]] if name in teachers else [])]
        for other in others:
            if other in ranks:
                entries += compare((name, other), (ranks[name], ranks[other]), resampling)
    return entries


def compare(
    names: tuple[str, str], ranks: tuple[np.ndarray, np.ndarray], resampling: Resampling
) -> list[dict[str, Any]]:
    """Paired bootstrap of two systems, one entry a metric: what the first has over the second.

    Args:
        names: of the systems.
        ranks: of the targets of the same users, int64 [R] each.
        resampling: N and the bootstrap.
    """
    first, second = (per_user_metrics(own, resampling.n) for own in ranks)
    entries = []
    for metric in COMPARED:
        if metric not in first or not len(ranks[0]):
            continue
        test = paired_test(first[metric], second[metric], resampling.samples, resampling.seed)
        entry = {"a": names[0], "b": names[1], "metric": metric, "difference": test.difference}
        entries.append({**entry, "ci95": list(test.ci95), "p": test.p_bootstrap})
    return entries


def comparison_cells(comparisons: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Comparisons as cells of a table, the header first: one row for two systems, three columns for a metric."""
    metrics = list(dict.fromkeys(entry["metric"] for entry in comparisons))
    pairs: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry in comparisons:
        ends = " to ".join(f"{end:+.3f}" for end in entry["ci95"])
        shown = [f"{entry['difference']:+.4f}", ends, f"{entry['p']:.3f}"]
        pairs.setdefault((entry["a"], entry["b"]), {})[entry["metric"]] = shown
    header = ["system", "against", *(cell for metric in metrics for cell in (metric, "95%", "p"))]
    missing = [""] * 3
    return [
        header,
        *(
            [*pair, *(cell for metric in metrics for cell in found.get(metric, missing))]
            for pair, found in pairs.items()
        ),
    ]
