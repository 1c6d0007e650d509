"""How far a student is from its teacher on its own answers, and whether its confidences mean what they say.

Three things that decide how fast a block decoder may go: the divergence from the teacher by how much of a block is
still masked, the calibration of the confidences by which slots are committed, and the column sums of the matrix of
label probabilities (slots of the ranked list by candidates). A permutation holds each candidate once, so calibrated
marginals sum to 1 over the slots: then no two slots can both give one label more than 1/2. That holds for a list in one
block; where it crosses a border, the later block reads the labels before it, and a label's sum may be anything up to 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from recbole_dgr2.report.benchmark_page import markdown

SHARES = tuple(tenth / 10 for tenth in range(11))
"""Bounds of the bins of masked share."""
CONFIDENCES = (*SHARES[:-1], 0.95, 0.99, 1.0)
"""Bounds of the bins of confidence: narrower at the top, where the usual thresholds lie and most commits fall."""
_MISSING = "-"


@dataclass(frozen=True)
class MaskedSlots:
    """Slots that were masked in some state of their block, one entry each.

    kl: float [M], divergence from the teacher, nats. masked_share: float [M] in (0, 1], masked share of the block's
    slots but its seed in that state. answer: bool [M], whether the slot is of the answer.
    """

    kl: np.ndarray
    masked_share: np.ndarray
    answer: np.ndarray


@dataclass(frozen=True)
class Commits:
    """Committed slots: confidence, float [C] in [0, 1]; agrees, bool [C]: the teacher's likeliest token is the same."""

    confidence: np.ndarray
    agrees: np.ndarray


def diagnosis(slots: MaskedSlots, commits: Commits, labels: Sequence[np.ndarray]) -> dict[str, Any]:
    """All figures as plain JSON values.

    Args:
        slots, commits: of the answers that were looked at.
        labels: a matrix for every ranked list, float [slots, N]: probability of each candidate's label at each slot
            with all slots of the list masked.
    """
    parts = {"all": np.ones_like(slots.answer), "reasoning": ~slots.answer, "answer": slots.answer}
    return {
        "kl": {
            name: {"slots": int(chosen.sum()), "kl": _mean(slots.kl[chosen])}
            for name, chosen in parts.items()
        },
        "kl_by_masked_share": [
            {**bounds, "slots": int(chosen.sum()), "kl": _mean(slots.kl[chosen])}
            for bounds, chosen in _bins(slots.masked_share, SHARES)
        ],
        "calibration": calibration(commits),
        "labels": label_sums(labels),
    }


def calibration(commits: Commits) -> dict[str, Any]:
    """Reliability bins and the expected calibration error (Naeini et al. 2015; Guo et al., arXiv 1706.04599).

    The error is the mean over commits of |mean confidence - share that agrees| of the commit's bin; None without one.
    """
    bins, gap = [], 0.0
    for bounds, chosen in _bins(commits.confidence, CONFIDENCES):
        confidence, agreement = _mean(commits.confidence[chosen]), _mean(commits.agrees[chosen])
        bins.append({**bounds, "slots": int(chosen.sum()), "confidence": confidence, "agreement": agreement})
        if confidence is not None and agreement is not None:
            gap += float(chosen.sum()) * abs(confidence - agreement)
    count = len(commits.confidence)
    return {"slots": count, "expected_calibration_error": gap / count if count else None, "bins": bins}


def label_sums(labels: Sequence[np.ndarray]) -> dict[str, Any]:
    """Column and row sums of slot x candidate matrices, each float [slots, N].

    column_sums: mean over lists of the k-th largest column sum, from the largest, over the lists with the most
    candidates; column_deviation: mean |column sum - 1| over all columns of all lists; row_sum: mean probability that a
    slot leaves to labels; doubly_taken: share of columns in which two slots give the label more than 1/2 each.
    """
    if not labels:
        return {
            "lists": 0, "column_sums": [], "column_deviation": None, "row_sum": None, "doubly_taken": None
        }  # fmt: skip
    sums = [matrix.sum(axis=0) for matrix in labels]
    widest = max(map(len, sums))
    largest = np.array([np.sort(values)[::-1] for values in sums if len(values) == widest])
    columns = np.concatenate(sums)
    twice = np.concatenate([(matrix > 0.5).sum(axis=0) > 1 for matrix in labels])
    return {
        "lists": len(labels),
        "column_sums": largest.mean(axis=0).tolist(),
        "column_deviation": float(np.abs(columns - 1).mean()),
        "row_sum": float(np.concatenate([matrix.sum(axis=1) for matrix in labels]).mean()),
        "doubly_taken": float(twice.mean()),
    }


def diagnostics_page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of several stages, by name, as Markdown tables."""
    lines = ["Divergence from the teacher, nats a masked slot, by how much of the block is masked:", ""]
    lines += [
        *markdown(kl_cells(found)),
        "",
        "Commits: confidence, and share that is the teacher's own choice:",
    ]
    lines += [
        "",
        *markdown(calibration_cells(found)),
        "",
        "Label probabilities with the whole list masked:",
        "",
    ]
    return "\n".join([*lines, *markdown(label_cells(found))]) + "\n"


def kl_cells(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Table of divergences, a row a stage, the header first."""
    bins = [f"{low:.1f}-{high:.1f}" for low, high in pairwise(SHARES)]
    cells = [["stage", "slots", "all", "reasoning", "answer", *bins]]
    for name, figures in found.items():
        parts = [_number(figures["kl"][part]["kl"]) for part in ("all", "reasoning", "answer")]
        shares = [_number(entry["kl"]) for entry in figures["kl_by_masked_share"]]
        cells.append([name, str(figures["kl"]["all"]["slots"]), *parts, *shares])
    return cells


def calibration_cells(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Table of reliability, a row a stage and bin that holds a commit, the header first."""
    cells = [["stage", "confidence", "commits", "mean confidence", "agrees", "calibration error"]]
    for name, figures in found.items():
        whole = figures["calibration"]
        for entry in whole["bins"]:
            if entry["slots"]:
                bounds, figure = f"{entry['low']:g}-{entry['high']:g}", _number(entry["agreement"])
                cells.append([name, bounds, str(entry["slots"]), _number(entry["confidence"]), figure, ""])
        error = _number(whole["expected_calibration_error"])
        cells.append([name, "all", str(whole["slots"]), "", "", error])
    return cells


def label_cells(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Table of column sums, a row a stage, the header first."""
    cells = [["stage", "lists", "column sums, largest first", "off 1 by", "row sum", "doubly taken"]]
    for name, figures in found.items():
        entry = figures["labels"]
        sums = " ".join(f"{value:.2f}" for value in entry["column_sums"]) or _MISSING
        rest = [_number(entry[key]) for key in ("column_deviation", "row_sum", "doubly_taken")]
        cells.append([name, str(entry["lists"]), sums, *rest])
    return cells


def _bins(values: np.ndarray, bounds: Sequence[float]) -> list[tuple[dict[str, float], np.ndarray]]:
    """Bounds of each bin (low, high] and which values lie in it, bool [M]; the first holds its low end as well."""
    index = np.clip(np.searchsorted(bounds, values, side="left") - 1, 0, len(bounds) - 2)
    pairs = enumerate(pairwise(bounds))
    return [({"low": low, "high": high}, index == number) for number, (low, high) in pairs]


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.4f}"
