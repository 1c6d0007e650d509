"""What a forward pass costs on this machine, as a function of its query tokens."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

import numpy as np
import torch

from recbole_dgr2.decode.cache import SlotCache
from recbole_dgr2.model.forward import forward_cached

QUERIES = (1, 8, 16, 32)
SECONDS = 1.0  # time given to the measurement of one batch size
ROUNDS = (2, 20)  # least and most turns, in each of which every number of query tokens has its burst
BURST = 4  # passes of one kind in a row, the first of them untimed: it finds the processor's caches full of another's

_MEASURED: dict[tuple[object, ...], PassCosts] = {}


@dataclass(frozen=True)
class PassCosts:
    """Seconds of one shared forward of `batch` rows; queries, seconds: at so many query tokens a row, rising."""

    batch: int
    queries: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, queries: float) -> float:
        """Seconds at any number of query tokens, linear between and beyond the measured ones."""
        x, y = self.queries, self.seconds
        if queries <= x[-1]:
            return float(np.interp(queries, x, y))
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0)
        return y[-1] + slope * (queries - x[-1])

    @property
    def token_cost(self) -> float:
        """What one more query token adds, as a share of a pass's fixed cost (least-squares line), at least 0.001."""
        slope, fixed = np.polyfit(self.queries, self.seconds, 1)
        return float(min(max(slope / max(fixed, 1e-9), 1e-3), 1.0))


def measure_pass_costs(model: torch.nn.Module, batch: int, context: int) -> PassCosts:
    """Seconds (lower quartile) of a forward of `batch` rows after `context` tokens at each of QUERIES; takes SECONDS.

    Kept for the life of the process, by model shape, device, type, threads and batch.
    """
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    size = sum(parameter.numel() for parameter in model.parameters())
    shape = (type(model).__name__, size, *weight.shape, weight.dtype, weight.device)
    machine = (platform.node(), torch.get_num_threads(), torch.get_num_interop_threads())
    bucket = 1 << max(context - 1, 1).bit_length()
    key = (*shape, *machine, batch, bucket)
    if key not in _MEASURED:
        _MEASURED[key] = _measure(model, batch, context)
    return _MEASURED[key]


@torch.inference_mode()
def _measure(model: torch.nn.Module, batch: int, context: int) -> PassCosts:
    device = next(model.parameters()).device
    cache = SlotCache(batch, context + max(QUERIES), device)
    offsets = np.full(batch, context)
    times: dict[int, list[float]] = {q: [] for q in QUERIES}
    begin = time.perf_counter()
    for turn in range(ROUNDS[1] + 1):
        for q in QUERIES:
            burst = [_time_pass(model, cache, offsets, q) for _ in range(BURST)]
            if turn:  # the first turn warms up
                times[q] += burst[1:]
        if turn >= ROUNDS[0] and time.perf_counter() - begin > SECONDS:
            break
    # the lower quartile: other work on the machine only ever adds, and not the same to every kind of pass
    quartiles = [np.quantile(times[q], 0.25) for q in QUERIES]
    return PassCosts(batch, QUERIES, tuple(np.maximum.accumulate(quartiles).tolist()))


def _time_pass(model: torch.nn.Module, cache: SlotCache, offsets: np.ndarray, q: int) -> float:
    batch, device = len(offsets), cache.device
    begin = time.perf_counter()
    end = cache.write_rows(offsets, q)
    positions = torch.arange(end - q, end, device=device)
    allowed = (torch.arange(end, device=device) <= positions[:, None]).expand(batch, q, end)
    rows = torch.arange(batch, device=device).repeat_interleave(q)
    cols = torch.arange(q, device=device).repeat(batch)
    ids = torch.ones(batch, q, dtype=torch.long, device=device)
    logits = forward_cached(model, ids, positions.expand(batch, q), allowed, cache, rows, cols)
    logits.log_softmax(dim=-1).max(dim=-1).indices.cpu()  # as a policy does; waits for the device
    return time.perf_counter() - begin
