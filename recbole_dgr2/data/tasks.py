"""Ranking tasks: one list to rank, as far as a model may know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import FACTS, FactScale, FactSource

_KEY_ENDS = 2**24


@dataclass(frozen=True)
class RankingTask:
    """A user's history and candidates with the facts about them; never the target.

    Args:
        key: identifies the list for ever; random numbers are keyed by it.
        history: item ids, oldest first.
        candidates: item ids in the retriever's order, padding left out.
        levels: int64 [len(candidates), F], levels of the facts in `fact_names`.
        fact_names: F names.
    """

    key: int
    history: tuple[int, ...]
    candidates: tuple[int, ...]
    levels: np.ndarray
    fact_names: tuple[str, ...]


@dataclass(frozen=True)
class TaskBuilder:
    """Grounds candidates in evidence: what `Candidates` and histories become before a prompt is written.

    `history_length` is the number of recent items that a task keeps.
    """

    evidence: FactSource
    scale: FactScale
    history_length: int

    @property
    def fact_names(self) -> tuple[str, ...]:
        """Names of the facts that vary in this data set."""
        return tuple(FACTS[fact] for fact in self.scale.active)

    def levels(self, candidates: Candidates, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Fact levels of every candidate slot, int64 [R, N, F]."""
        return self.scale.levels(self.evidence.measure(candidates, histories))

    def build(self, candidates: Candidates, histories: Sequence[np.ndarray]) -> list[RankingTask]:
        """One task a row."""
        levels = self.levels(candidates, histories)
        users, ends = candidates.rows.users.tolist(), candidates.rows.ends.tolist()
        return [
            RankingTask(
                key=user * _KEY_ENDS + end,
                history=tuple(history[-self.history_length :].tolist()),
                candidates=tuple(ids[:count].tolist()),
                levels=level[:count],
                fact_names=self.fact_names,
            )
            for user, end, history, ids, count, level in zip(
                users, ends, histories, candidates.ids, candidates.counts, levels, strict=True
            )
        ]
