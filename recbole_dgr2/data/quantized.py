"""Vectors written as sums of codewords, one a level, and the last level made unique.

I vectors of d dimensions, L levels, K codewords a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

_BLOCK = 2**24
"""Distances computed at a time; bounds the memory."""


@dataclass(frozen=True)
class CodeOptions:
    """Levels of a code, codewords a level, seed of all random numbers, and whether a progress bar is shown.

    Raises:
        ValueError: fewer than one level, or fewer than two codewords.
    """

    levels: int = 4
    codes: int = 256
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise ValueError(f"levels {self.levels}: expected at least 1")
        if self.codes < 2:
            raise ValueError(f"codes {self.codes}: expected at least 2")


@dataclass(frozen=True)
class Quantized:
    """Vectors, codebooks, and the nearest codeword of every level for what the levels before left over.

    vectors: float32 [I, d]. codebooks: L arrays float32 [<= K, d]; a level has fewer codewords where the residuals have
    fewer different values. codes: int64 [I, L].
    """

    vectors: np.ndarray
    codebooks: tuple[np.ndarray, ...]
    codes: np.ndarray

    def residual(self, level: int) -> np.ndarray:
        """What the levels before `level` leave of the vectors, float32 [I, d]."""
        left = self.vectors.copy()
        for before in range(level):
            left -= self.codebooks[before][self.codes[:, before]]
        return left

    def errors(self) -> list[float]:
        """Mean squared length of what is left after 0, 1, ... L levels, as shares of that after none (1 for zeros)."""
        levels = range(self.codes.shape[1] + 1)
        squares = [float(np.square(self.residual(level)).sum(axis=1).mean()) for level in levels]
        return [square / squares[0] if squares[0] else 1.0 for square in squares]

    def unique_codes(self, capacity: int) -> np.ndarray:
        """Codes in which no two vectors are equal, int64 [I, L]; only the last level may differ from `codes`.

        Under every prefix (all levels but the last) that two vectors with one last code share, its vectors get distinct
        last codes so that the sum of squared distances of their residuals to these codewords is least. Codes without
        a codeword are given when all others are taken; codes >= `capacity` (K) only where a prefix holds more vectors
        than codes.
        """
        codes, last = self.codes.copy(), self.codes.shape[1] - 1
        residual, codebook = self.residual(last), self.codebooks[last]
        for group in colliding_groups(codes):
            distances = squared_distances(residual[group], codebook)
            codes[group, last] = distinct_codes(distances, capacity)
        return codes


def colliding_groups(codes: np.ndarray) -> list[np.ndarray]:
    """Positions of all rows whose prefix holds two rows of the same code, one array a prefix, in rising order."""
    _, prefix = np.unique(codes[:, :-1], axis=0, return_inverse=True)
    prefix = prefix.reshape(-1)
    _, whole, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    shared = np.unique(prefix[counts[whole.reshape(-1)] > 1])
    rows = np.flatnonzero(np.isin(prefix, shared))
    rows = rows[np.argsort(prefix[rows], kind="stable")]
    bounds = np.flatnonzero(np.diff(prefix[rows])) + 1
    return np.split(rows, bounds) if len(rows) else []


def distinct_codes(distances: np.ndarray, capacity: int) -> np.ndarray:
    """A code of its own for every row at the least sum of distances, int64 [G].

    Args:
        distances: float [G, k] to k codewords.
        capacity: K >= k; a code in k..K-1 costs more than any codeword. Rows beyond K get K, K + 1, ... in their order.
    """
    rows, k = distances.shape
    dear = float(distances.max(initial=0.0)) * (min(rows, capacity) + 1) + 1.0
    spare = np.full((rows, min(capacity, rows + k) - k), dear)
    taken, code = linear_sum_assignment(np.concatenate([distances, spare], axis=1))
    found = np.full(rows, -1, dtype=np.int64)
    found[taken] = code
    left = np.flatnonzero(found < 0)
    found[left] = capacity + np.arange(len(left))
    return found


def squared_distances(vectors: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances, float64 [I, k], never negative."""
    left, right = vectors.astype(np.float64), codebook.astype(np.float64)
    squares = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)
    return np.maximum(squares - 2.0 * left @ right.T, 0.0)


def nearest_codes(vectors: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """The nearest codeword of every vector, int64 [I]; the first of equally near ones."""
    rows = max(1, _BLOCK // len(codebook))
    starts = range(0, len(vectors), rows)
    blocks = [squared_distances(vectors[at : at + rows], codebook).argmin(axis=1) for at in starts]
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])
