"""What decoders are measured on: the test lists of a finished run, as prompts, with the slots of their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recbole_dgr2.decode import Request
from recbole_dgr2.pipeline.open_run import OpenRun
from recbole_dgr2.pipeline.preparation import draw_lists, make_lists, tasks_of
from recbole_dgr2.pipeline.reranker import LanguageModelReranker


@dataclass(frozen=True)
class Work:
    """Requests, with the length of each list and the slot of its target (None: no candidate)."""

    requests: Sequence[Request]
    candidates: Sequence[int]
    targets: Sequence[int | None]

    def first(self, count: int) -> Work:
        """The first `count` requests."""
        return Work(self.requests[:count], self.candidates[:count], self.targets[:count])


@dataclass(frozen=True)
class Lists:
    """Two samples of a run's test lists, both in random order: of all users, and of hits."""

    users: Work
    hits: Work

    def first(self, count: int) -> Lists:
        """The first `count` of either."""
        return Lists(self.users.first(count), self.hits.first(count))


def work_of(run: OpenRun, reranker: LanguageModelReranker, users: int, seed: int) -> Lists:
    """At most `users` test lists of all users, and at most as many hits, drawn by seed.

    Raises:
        ValueError: no user of the run has a test list with candidates.
    """
    n = run.config["n_candidates"]
    lists = make_lists(run.data, run.source, "test", n)
    drawn = draw_lists(lists, users, seed)
    if not len(drawn):
        raise ValueError(f"{run.folder}: no user has a test list, so there is nothing to measure on")
    random = np.random.default_rng(seed)
    hits = np.flatnonzero(lists.slots < n)
    chosen = [random.permutation(drawn), random.permutation(hits)[:users]]
    works = []
    for rows in chosen:
        tasks = tasks_of(reranker.tasks, lists, rows)
        slots = lists.slots[rows].tolist()
        works.append(
            Work(
                reranker.requests(tasks),
                [len(task.candidates) for task in tasks],
                [slot if slot < n else None for slot in slots],
            )
        )
    return Lists(*works)
