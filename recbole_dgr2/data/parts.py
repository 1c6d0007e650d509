"""Which interactions a training candidate may come from: the parts of a candidate split.

A retriever that has seen a target ranks it too high, and a re-ranker that learns from such lists learns a distribution
it never meets. So training lists, and the facts about their candidates, come from a *part* of the training interactions
that holds none of the targets it serves. Lists for validation and test come from all training interactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import FACTS, FactSource
from recbole_dgr2.data.sequences import Sequences

CandidateSplit = Literal["last_m", "user_folds", "leaky"]
SPLITS: tuple[CandidateSplit, ...] = ("last_m", "user_folds", "leaky")


@dataclass(frozen=True)
class SplitOptions:
    """How training candidates are kept from their targets.

    mode: "last_m" leaves out the last `last_m` training interactions of each user; "user_folds" leaves out whole
    users, one of `n_folds` folds drawn by `seed` at a time; "leaky" leaves nothing out, for comparison only.
    `last_m` is in any mode the number of training lists a user at most.
    """

    mode: CandidateSplit
    last_m: int
    n_folds: int
    seed: int


@dataclass(frozen=True)
class Part:
    """Some of the training interactions: the first `lengths[u]` of each user, int64 [n_users].

    `serves`, bool [n_users], are the users whose training lists come from this part.
    """

    name: str
    lengths: np.ndarray
    serves: np.ndarray

    def sequences(self, sequences: Sequences) -> Sequences:
        """The interactions of the part, cut from all."""
        return sequences.truncate(sequences.lengths - self.lengths)


def final_part(sequences: Sequences) -> Part:
    """All training interactions; serves no training list."""
    return Part("final", sequences.training_lengths(), np.zeros(sequences.n_users, dtype=bool))


def training_parts(sequences: Sequences, options: SplitOptions) -> tuple[Part, ...]:
    """The parts that training lists come from; every user is served by exactly one.

    Raises:
        ValueError: an unknown mode, or more folds than users.
    """
    trained, everyone = sequences.training_lengths(), np.ones(sequences.n_users, dtype=bool)
    if options.mode == "leaky":
        return (Part("leaky", trained, everyone),)
    if options.mode == "last_m":
        return (Part("holdout", holdout_lengths(sequences, options.last_m), everyone),)
    if options.mode != "user_folds":
        raise ValueError(f"candidate_split {options.mode!r}: expected one of {', '.join(SPLITS)}")
    fold_of = user_folds(sequences, options.n_folds, options.seed)
    return tuple(
        Part(f"fold{fold + 1}of{options.n_folds}", np.where(fold_of == fold, 0, trained), fold_of == fold)
        for fold in range(options.n_folds)
    )


def holdout_lengths(sequences: Sequences, last_m: int, keep: int = 1) -> np.ndarray:
    """int64 `[n_users]`: each user's first interactions without the last `last_m` training ones; `keep` stay."""
    trained = sequences.training_lengths()
    return trained - np.clip(trained - keep, 0, last_m)


def user_folds(sequences: Sequences, n_folds: int, seed: int) -> np.ndarray:
    """int64 `[n_users]`: a fold 0..n_folds-1 for each user, drawn by seed; folds differ by one user at most."""
    if not 2 <= n_folds <= sequences.n_users - 1:
        raise ValueError(f"n_folds {n_folds}: expected 2 to {sequences.n_users - 1}, the number of users")
    return np.random.default_rng(seed).permutation(sequences.n_users) % n_folds


@dataclass(frozen=True)
class PartedEvidence:
    """Facts about training candidates, each list's from the part that serves its user.

    `parts` holds (bool [n_users] of the users served, statistics) for each part.
    """

    parts: tuple[tuple[np.ndarray, FactSource], ...]

    def measure(self, candidates: Candidates, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Facts of every candidate slot, float64 [R, N, F]; see `measure_facts`."""
        facts = np.zeros((*candidates.ids.shape, len(FACTS)))
        for serves, evidence in self.parts:
            rows = np.flatnonzero(serves[candidates.rows.users])
            if len(rows):
                own = [histories[row] for row in rows.tolist()]
                facts[rows] = evidence.measure(candidates.take(rows), own)
        return facts
