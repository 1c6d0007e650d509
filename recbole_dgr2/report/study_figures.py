"""Figures of a study, from the ranks and counts that `python -m recbole_dgr2.study` keeps: no decoding, no model.

An entry is one system of one seed under one decoder, as plain values:

    name, seed, decoder     the row; a decoder is "none" for a system without a language model
    ranks                   0-based, of the target of each hit, as one text "0 3 1 ..."
    rows                    which hits `ranks` belongs to (text), None for all of them
    all                     metrics over all users
    valid, hits_valid       {answers, valid, failures} of the raw answers of the sample and of the hits
    copied, tokens_per_pass, acceptance, equal_to_ar, seconds, teacher, varies
    traces                  how the traces came about that a teacher was fine-tuned on, as a text, or None
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from recbole_dgr2.report.comparison import PLAIN_SYSTEMS
from recbole_dgr2.report.evaluation import FAILURES, per_user_metrics
from recbole_dgr2.report.significance import (
    FloatArray,
    Interval,
    PairedTest,
    bootstrap_intervals,
    exact_mean,
    paired_test,
    wilson_interval,
)

AR: Final = "autoregressive"
SPECULATIVE, PLAIN, TAU = "speculative", "none", "block 0.9"
FLOOR, NAIVE = PLAIN_SYSTEMS[0], "naive"
TEACHERS = ("ar_teacher", "ar_teacher_rl")
STUDENTS = ("conversion", "distillation", "reinforcement")
ROWS = (*PLAIN_SYSTEMS, *TEACHERS, NAIVE, *STUDENTS)
METRICS = ("recall@1", "recall@3", "ndcg@3")
EVERYONE = ("recall@1", "recall@10", "ndcg@10")
GAIN = "recall@1"  # in which a lift is shared out
SAMPLES = 2000  # resamples of an interval


@dataclass(frozen=True)
class Averaged:
    """One row of a table: the entries of one name and decoder, one a seed, and the speeds of the same weights.

    n: candidates; hits: H.
    """

    entries: tuple[Mapping[str, Any], ...]
    speeds: tuple[Mapping[str, Any], ...]
    n: int
    hits: int

    @property
    def seeds(self) -> list[int]:
        """Seeds in the order of the entries."""
        return [entry["seed"] for entry in self.entries]

    @cached_property
    def rows(self) -> np.ndarray:
        """int64: hits that every seed has an answer for."""
        found = set(range(self.hits))
        for entry in self.entries:
            if entry["rows"] is not None:
                found &= set(_numbers(entry["rows"]))
        return np.array(sorted(found), dtype=np.int64)

    def of(self, metric: str, rows: np.ndarray, seeds: Sequence[int] | None = None) -> FloatArray:
        """A metric by user, averaged over seeds (None: all), float64 [len(rows)]."""
        chosen = [entry for entry in self.entries if seeds is None or entry["seed"] in seeds]
        return np.stack([self._values(entry, metric, rows) for entry in chosen]).mean(axis=0)

    def by_seed(self, metric: str) -> list[float]:
        """Mean over hits of each seed; empty without hits."""
        if not len(self.rows):
            return []
        return [exact_mean(self._values(entry, metric, self.rows)) for entry in self.entries]

    def interval(self, metric: str, seed: int) -> Interval | None:
        """Bootstrap interval over users of the mean over seeds; None without hits."""
        if not len(self.rows):
            return None
        return bootstrap_intervals({metric: self.of(metric, self.rows)}, SAMPLES, seed)[metric]

    def mean(self, key: str) -> float | None:
        """Mean over seeds of a number of the entries; None where none has it."""
        return mean_of([entry.get(key) for entry in self.entries])

    def everyone(self, metric: str) -> float | None:
        """Mean over seeds of a metric over all users."""
        return mean_of([entry["all"].get(metric) for entry in self.entries])

    def speedup(self) -> float | None:
        """Mean over seeds of the speed-up at batch 1 over autoregressive decoding of the same weights."""
        return mean_of([speed["speedup"] for speed in self.speeds])

    def valid(self, view: str = "valid") -> tuple[float, Interval, dict[str, int]] | None:
        """Valid share of the pooled raw answers of all seeds, its Wilson interval, failures by kind."""
        counts = [entry[view] for entry in self.entries if entry.get(view)]
        answers, valid = (sum(count[key] for count in counts) for key in ("answers", "valid"))
        if not answers:
            return None
        failures: Counter[str] = Counter()
        for count in counts:
            failures.update(count["failures"])
        return valid / answers, wilson_interval(valid, answers), {kind: failures[kind] for kind in FAILURES}

    def _values(self, entry: Mapping[str, Any], metric: str, rows: np.ndarray) -> FloatArray:
        at = (
            {hit: place for place, hit in enumerate(_numbers(entry["rows"]))}
            if entry["rows"] is not None
            else None
        )
        ranks = np.array(_numbers(entry["ranks"]), dtype=np.int64)
        places = rows if at is None else np.array([at[row] for row in rows.tolist()], dtype=np.int64)
        return per_user_metrics(ranks[places], self.n)[metric]


@dataclass(frozen=True)
class Study:
    """All entries and speeds of a study's JSON."""

    content: Mapping[str, Any]

    def row(self, name: str, decoder: str | None = None) -> Averaged | None:
        """Entries of one name and decoder (None: that of the first table), by seed; None where there are none."""
        decoder = main_decoder(self.content["entries"], name) if decoder is None else decoder
        found = [e for e in self.content["entries"] if e["name"] == name and e["decoder"] == decoder]
        speeds = [
            speed["decoders"][decoder]
            for speed in self.content["speeds"]
            if speed["name"] == name and decoder in speed["decoders"]
        ]
        if not found:
            return None
        found.sort(key=lambda entry: entry["seed"])
        return Averaged(tuple(found), tuple(speeds), self.content["n_candidates"], self.content["n_hits"])

    @property
    def names(self) -> list[str]:
        """Names of the rows there are, in the order of the tables, variants last."""
        there = list(dict.fromkeys(entry["name"] for entry in self.content["entries"]))
        return [*(name for name in ROWS if name in there), *(name for name in there if name not in ROWS)]

    @property
    def metrics(self) -> list[str]:
        """Metrics over hits that lists of N candidates have."""
        return [name for name in METRICS if int(name.partition("@")[2]) <= self.content["n_candidates"]]

    @property
    def teacher(self) -> str | None:
        """The autoregressive stage that the students grew out of, else the last there is."""
        students = [entry["teacher"] for entry in self.content["entries"] if entry["name"] in STUDENTS]
        there = [name for name in TEACHERS if name in self.names]
        return next((name for name in students if name in there), there[-1] if there else None)

    def decoders(self, name: str) -> list[str]:
        """Decoders of a row, thresholds falling, the speculative one last."""
        found = {entry["decoder"] for entry in self.content["entries"] if entry["name"] == name}
        blocks = [decoder for decoder in found if decoder.startswith("block ")]
        order = [AR, *sorted(blocks, key=lambda decoder: -float(decoder.split()[1])), SPECULATIVE]
        return [decoder for decoder in order if decoder in found]

    def lift_share(self, row: Averaged) -> float | None:
        """(x - floor) / (teacher - floor) in recall@1, over the row's hits and seeds; None where it cannot be told."""
        floor, teacher = self.row(FLOOR), self.row(self.teacher) if self.teacher else None
        if floor is None or teacher is None or not len(row.rows):
            return None
        seeds = [seed for seed in row.seeds if seed in teacher.seeds]
        if not seeds:
            return None
        x, low, high = (exact_mean(one.of(GAIN, row.rows, seeds)) for one in (row, floor, teacher))
        return None if high == low else (x - low) / (high - low)

    def pairs(self) -> list[tuple[str, str]]:
        """What is compared with what, each pair once."""
        names, varied = self.names, {}
        for entry in self.content["entries"]:
            if entry["varies"]:
                varied[entry["name"]] = entry["varies"]
        found: list[tuple[str, str | None]] = []
        for name in names:
            others: list[str | None] = [FLOOR]
            if name not in PLAIN_SYSTEMS:
                origin = TEACHERS[0] if name in TEACHERS else self.teacher
                others += [*PLAIN_SYSTEMS[1:], origin, varied.get(name)]
            if name == "distillation":
                others.append("conversion")
            if name == "reinforcement":
                others.append("distillation" if "distillation" in names else "conversion")
            found += [(name, other) for other in others]
        return list(dict.fromkeys((a, b) for a, b in found if b in names and b is not None and a != b))

    def test(self, a: str, b: str, metric: str) -> tuple[PairedTest, int, int] | None:
        """Paired bootstrap over the users both answered, of values averaged over the seeds that both have.

        Returns:
            The test, the number of users and of seeds; None where nothing is shared.
        """
        first, second = self.row(a), self.row(b)
        if first is None or second is None:
            return None
        rows = np.intersect1d(first.rows, second.rows)
        seeds = [seed for seed in first.seeds if seed in second.seeds]
        if not len(rows) or not seeds:
            return None
        test = paired_test(
            first.of(metric, rows, seeds),
            second.of(metric, rows, seeds),
            SAMPLES,
            self.content["sample_seed"],
        )
        return test, len(rows), len(seeds)


def main_decoder(entries: Sequence[Mapping[str, Any]], name: str) -> str:
    """Decoder of a row in the table of accuracy: blocks at tau 0.9 for a student, else the only one there is."""
    found = [entry["decoder"] for entry in entries if entry["name"] == name]
    return TAU if TAU in found or not found else found[0]


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of what is there; None where nothing is."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]
