"""Residual k-means: each level clusters what the levels before it left over."""

from __future__ import annotations

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from recbole_dgr2.data.quantized import CodeOptions, Quantized, nearest_codes

LARGE = 100_000
"""Vectors from which a level is clustered by mini-batches, whose time does not grow with the number of vectors."""
_ITERATIONS = 100


def residual_kmeans(vectors: np.ndarray, options: CodeOptions) -> Quantized:
    """Quantise vectors level by level; the same vectors and options give the same codes.

    Args:
        vectors: float32 [I, d], I >= 1.
        options: levels, codewords, seed.

    Raises:
        ValueError: no vectors.
    """
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(f"residual k-means: expected vectors [I, d], got {list(vectors.shape)}")
    left = np.array(vectors, dtype=np.float32)
    codebooks, codes = [], []
    hidden = None if options.progress else True  # None: shown on a terminal only
    for level in tqdm(range(options.levels), desc="residual k-means", disable=hidden, leave=False):
        codebook = cluster(left, options.codes, options.seed + level)
        code = nearest_codes(left, codebook)
        left -= codebook[code]
        codebooks.append(codebook)
        codes.append(code)
    return Quantized(np.array(vectors, dtype=np.float32), tuple(codebooks), np.stack(codes, axis=1))


def cluster(vectors: np.ndarray, count: int, seed: int, iterations: int = _ITERATIONS) -> np.ndarray:
    """Centres of `count` clusters, float32 [<= count, d]: as many as there are different vectors, if these are fewer.

    Runs on one thread: with more, sums are added in an order that differs from run to run.
    """
    distinct = np.unique(vectors, axis=0)
    if len(distinct) <= count:
        return distinct.astype(np.float32)
    kind, sizes = (KMeans, {}) if len(vectors) < LARGE else (MiniBatchKMeans, {"batch_size": 4096})
    model = kind(count, n_init=1, max_iter=iterations, random_state=seed, **sizes)
    with threadpool_limits(limits=1):
        model.fit(vectors)
    return model.cluster_centers_.astype(np.float32)
