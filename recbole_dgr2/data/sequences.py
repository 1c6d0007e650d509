"""Every user's items in time order, and the rows (one list to rank each) that are cut from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Phase = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Sequences:
    """Items of all users in time order, in one flat array.

    Ids are internal ids: 0 is padding and never occurs. `n_users` and `n_items` count it.

    Attributes:
        n_users: Size of the user vocabulary, padding included.
        n_items: Size of the item vocabulary, padding included.
        offsets: int64 `[n_users + 1]`; user `u` owns `items[offsets[u]:offsets[u + 1]]`.
        items: int64 `[n_interactions]`, each user's oldest item first.
    """

    n_users: int
    n_items: int
    offsets: np.ndarray
    items: np.ndarray

    def __post_init__(self) -> None:
        if self.offsets.shape != (self.n_users + 1,) or self.offsets[0] != 0:
            raise ValueError(f"offsets: expected [{self.n_users + 1}] from 0, got {list(self.offsets.shape)}")
        if int(self.offsets[-1]) != len(self.items) or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"offsets: expected to rise to {len(self.items)}, got {int(self.offsets[-1])}")
        if len(self.items) and not (self.items.min() > 0 and self.items.max() < self.n_items):
            raise ValueError(
                f"items: expected ids in 1..{self.n_items - 1}, got {self.items.min()}..{self.items.max()}"
            )

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[n_users]`: the number of interactions of each user."""
        return np.diff(self.offsets)

    def of(self, user: int) -> np.ndarray:
        """All items of one user, oldest first. Raises ValueError for a user outside the vocabulary."""
        if not 0 <= user < self.n_users:
            raise ValueError(f"user {user}: unknown, expected an internal id in 0..{self.n_users - 1}")
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def truncate(self, drop: np.ndarray) -> Sequences:
        """The same users with the last `drop[u]` items of each removed (all of them where it has fewer)."""
        if drop.shape != (self.n_users,) or (drop < 0).any():
            raise ValueError(f"drop: expected {self.n_users} counts of at least 0, got {list(drop.shape)}")
        kept = np.maximum(self.lengths - drop, 0)
        flat, _ = self.prefix_index(np.arange(self.n_users), kept)
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
        return Sequences(self.n_users, self.n_items, offsets, self.items[flat])

    def without_last(self, m: int, keep: int = 1) -> Sequences:
        """The last `m` items of each user removed, but never more than leaves it `keep` (or what it has)."""
        return self.truncate(np.clip(self.lengths - keep, 0, m))

    def training_lengths(self) -> np.ndarray:
        """int64 `[n_users]`: how many of each user's first interactions RecBole trains a sequential model on.

        Leave-one-out takes the last item for the test and the one before for validation. RecBole splits the
        n - 1 (history, next item) pairs of a user, and leaves at least one of them in training: with three
        items there is no validation row, with fewer neither a validation nor a test row.
        """
        n = self.lengths
        return np.where(n >= 4, n - 2, np.minimum(n, 2))

    def prefix_index(self, users: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the first `ends[r]` items of `users[r]`, for all rows at once.

        Args:
            users: int64 `[R]`.
            ends: int64 `[R]`, at most the user's length.

        Returns:
            Two int64 arrays `[sum(ends)]`: positions in `items`, and the row each belongs to.
        """
        before = np.cumsum(ends) - ends
        flat = np.arange(int(ends.sum()), dtype=np.int64) + np.repeat(self.offsets[users] - before, ends)
        return flat, np.repeat(np.arange(len(users), dtype=np.int64), ends)


@dataclass(frozen=True)
class Rows:
    """Lists to rank: row `r` ranks for `users[r]` after its first `ends[r]` items, its target is the next.

    Attributes:
        users: int64 `[R]`.
        ends: int64 `[R]`.
    """

    users: np.ndarray
    ends: np.ndarray

    def __post_init__(self) -> None:
        if self.users.ndim != 1 or self.users.shape != self.ends.shape:
            raise ValueError(
                f"rows: expected as many users as ends, got {len(self.users)} and {len(self.ends)}"
            )

    def __len__(self) -> int:
        return len(self.users)

    def targets(self, sequences: Sequences) -> np.ndarray:
        """int64 `[R]`: the item after each history. Raises ValueError for a row that has none."""
        self._check(sequences, beyond=1)
        return sequences.items[sequences.offsets[self.users] + self.ends]

    def histories(self, sequences: Sequences, limit: int | None = None) -> list[np.ndarray]:
        """The last `limit` items (all of them for None) of each history, oldest first; views, not copies."""
        self._check(sequences, beyond=0)
        first = sequences.offsets[self.users]
        stop = first + self.ends
        start = first if limit is None else np.maximum(first, stop - limit)
        return [sequences.items[a:b] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]

    def take(self, index: np.ndarray | slice) -> Rows:
        """The rows at `index`: a slice, positions, or a bool mask."""
        return Rows(self.users[index], self.ends[index])

    def _check(self, sequences: Sequences, beyond: int) -> None:
        if not len(self):
            return
        if self.users.min() < 0 or self.users.max() >= sequences.n_users:
            unknown = int(self.users[(self.users < 0) | (self.users >= sequences.n_users)][0])
            raise ValueError(
                f"user {unknown}: unknown, expected an internal id in 0..{sequences.n_users - 1}"
            )
        short = np.flatnonzero((self.ends < 0) | (self.ends + beyond > sequences.lengths[self.users]))
        if len(short):
            user, end = int(self.users[short[0]]), int(self.ends[short[0]])
            have = int(sequences.lengths[user])
            raise ValueError(f"user {user}: a row ends at {end}, but the user has {have} interactions")


def leave_one_out_rows(sequences: Sequences, phase: Phase, last_m: int = 1) -> Rows:
    """Rows of one phase of RecBole's leave-one-out split (`LS: valid_and_test`), ordered by user.

    `test`: the history is all but the last item (users of three items or more). `valid`: all but the last two
    (four or more). `train`: one row for each of the last `last_m` training interactions; a history is never
    empty. These are the rows of RecBole's sequential data loaders; see `Sequences.training_lengths`.

    Args:
        sequences: All interactions, validation and test included.
        phase: Which rows.
        last_m: Training rows a user at most; used for `train` only.
    """
    n = sequences.lengths
    users = np.arange(sequences.n_users, dtype=np.int64)
    if phase == "test":
        return Rows(users[n >= 3], n[n >= 3] - 1)
    if phase == "valid":
        return Rows(users[n >= 4], n[n >= 4] - 2)
    if phase != "train":
        raise ValueError(f"phase {phase!r}: expected train, valid or test")
    if last_m < 1:
        raise ValueError(f"last_m {last_m}: expected at least 1")
    trained = sequences.training_lengths()
    count = np.clip(trained - 1, 0, last_m)
    row_users = np.repeat(users, count)
    step = np.arange(len(row_users), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return Rows(row_users, np.repeat(trained - count, count) + step)
