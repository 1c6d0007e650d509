"""Batch order and random numbers as pure functions of (seed, step, example): nothing to store or to drift."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

BUCKET_BATCHES = (
    16  # batches a bucket: large enough that like lengths meet, small enough that the order stays random
)
VALIDATION_STEP = -1  # the step that keys validation noise: every validation scores the same masked slots


def generators(seed: int, step: int, keys: Sequence[int]) -> list[torch.Generator]:
    """Returns one CPU random generator an example, keyed by (seed, step, key) and by nothing else.

    Args:
        seed: the stage's seed.
        step: optimizer step, or `VALIDATION_STEP`.
        keys: example keys.
    """
    return [torch.Generator().manual_seed(_hash(seed, step, key)) for key in keys]


def _hash(*numbers: int) -> int:
    """Returns 32 well mixed bits, all that torch's CPU generator keeps of a seed."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def epoch_batches(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Cuts an epoch into batches of examples of like length.

    The examples are shuffled, cut into buckets of `BUCKET_BATCHES` batches, sorted by length inside a
    bucket, cut into batches, and the batches of all buckets are shuffled. Only the last batch of the last
    bucket can be smaller.

    Args:
        lengths: tokens of every example, int64 [n].
        batch_size: examples a batch.
        seed: the stage's seed.
        epoch: epoch number from 0; with `seed` it decides the order.

    Returns:
        Index arrays that together hold every example once.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    size = batch_size * BUCKET_BATCHES
    batches: list[np.ndarray] = []
    for start in range(0, len(order), size):
        bucket = order[start : start + size]
        bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
        batches.extend(bucket[at : at + batch_size] for at in range(0, len(bucket), batch_size))
    return [batches[index] for index in random.permutation(len(batches))]


def sorted_batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Cuts examples into batches by length, shortest first, where the order does not matter (validation)."""
    order = np.argsort(lengths, kind="stable")
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def process_share(batch: np.ndarray, rank: int, world: int, micro: int) -> list[np.ndarray]:
    """Returns the micro-batches of one process.

    Example i of the batch goes to process `i % world`, so lengths stay balanced. Every process gets the same
    number of micro-batches, since they reduce gradients together; one that has run out gets empty arrays.

    Args:
        batch: example indices of the whole batch.
        rank: this process, 0 <= rank < world.
        world: number of processes.
        micro: examples a micro-batch, 0 = all.
    """
    largest = -(-len(batch) // world)
    micro = micro or largest
    share = batch[rank::world]
    return [share[at : at + micro] for at in range(0, largest, micro)]
