"""How many threads torch should use, by measurement."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable

import torch

PROBE_SECONDS = 0.3
"""How long `choose_threads` may measure."""

_HOPELESS = 10
"""A count this many times slower than the best is not measured to the end, and after two such turns no more."""
_LEAST_TURNS = 3
"""Measurements a count above one must have to be chosen."""
_STEPS = 12


def choose_threads() -> int:
    """The number of torch threads, 1 to the cores of this process, with the best measured throughput.

    Small matrix products and elementwise operations, the mix of a small language model, are timed for one
    thread, two, four and so on, in turns. On a machine whose other cores are busy two threads ran 20 to 40
    times slower than one, so more threads must gain at least 15 % in the median turn to be chosen, and a
    machine too busy to measure within PROBE_SECONDS gets one. The thread count of torch is as before afterwards.
    """
    before = torch.get_num_threads()
    try:
        return pick_threads(thread_counts(available_cores()), _probe, PROBE_SECONDS)
    finally:
        torch.set_num_threads(before)


def use_threads(count: int) -> None:
    """Let torch use `count` threads, or as many as are measured to be best where it is 0; ValueError below 0."""
    if count < 0:
        raise ValueError(f"threads={count}: expected a number of threads, or 0 to have it measured")
    torch.set_num_threads(count or choose_threads())


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and `cores` itself."""
    powers = [2**i for i in range(cores.bit_length()) if 2**i < cores]
    return [*powers, cores]


def pick_threads(
    counts: list[int],
    probe: Callable[[int, float], float],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """The count whose median probe is fastest; a larger one must beat the smaller ones by 15 %.

    Args:
        counts: Rising, the first is 1.
        probe: `probe(count, limit)`: seconds that a fixed piece of work takes with `count` threads, infinity where it
            was given up after `limit` seconds.
        budget: Seconds of `clock` after which no further probe begins. What was not measured three times by then is
            not chosen.
        clock: Time that passes, in seconds.
    """
    if len(counts) == 1:
        return counts[0]
    end = clock() + budget
    times: dict[int, list[float]] = {count: [] for count in counts}
    while clock() < end:
        for count in counts:
            best = min((statistics.median(own) for own in times.values() if own), default=math.inf)
            if len(times[count]) >= 2 and min(times[count]) > _HOPELESS * best:
                continue
            left = end - clock()
            if left <= 0:
                break
            times[count].append(probe(count, min(left, _HOPELESS * best)))
    chosen = counts[0]
    for count in counts[1:]:
        if len(times[count]) < _LEAST_TURNS:
            continue
        if statistics.median(times[count]) < statistics.median(times[chosen]) / 1.15:
            chosen = count
    return chosen


def _probe(threads: int, limit: float) -> float:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 128, generator=generator)
    weight = torch.randn(128, 128, generator=generator)
    stop = time.perf_counter() + limit
    with torch.no_grad():
        torch.softmax(hidden @ weight, dim=-1)  # starts the pool, which is not what is measured
        start = time.perf_counter()
        for _ in range(_STEPS):
            if time.perf_counter() > stop:
                return math.inf
            hidden = torch.softmax(hidden @ weight, dim=-1) + hidden
        return time.perf_counter() - start
