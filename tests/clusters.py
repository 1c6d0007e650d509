"""Hand-made clusters of vectors, nested two levels deep."""

from __future__ import annotations

import numpy as np


def nested(each: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors float32 [16 * each, 6] around 4 far centres with 4 near ones at each, and both labels, int64 [., 2]."""
    rng = np.random.default_rng(seed)
    labels = np.stack([np.repeat(np.arange(4), 4 * each), np.tile(np.repeat(np.arange(4), each), 4)], axis=1)
    far, near = 10.0 * np.eye(4, 6), np.eye(4, 6)[:, ::-1]
    vectors = far[labels[:, 0]] + near[labels[:, 1]] + rng.normal(0, 0.01, (len(labels), 6))
    order = rng.permutation(len(labels))
    return vectors[order].astype(np.float32), labels[order]


def partition(codes: np.ndarray) -> set[frozenset[int]]:
    """The groups of equal rows of an int array, as sets of positions."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for position, code in enumerate(codes.reshape(len(codes), -1).tolist()):
        groups.setdefault(tuple(code), set()).add(position)
    return {frozenset(group) for group in groups.values()}
