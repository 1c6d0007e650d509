"""Mode "auto": the quickest way to the autoregressive output on this machine, for this model and batch.

The time of a forward is measured once for each (model shape, machine settings, batch) as a function of its query
tokens; what a draft is worth is read off the first few requests, which are decoded with drafts of several lengths.
Their answers are kept, since every way that is tried gives the same ones.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from recbole_dgr2.decode.cache import SlotCache
from recbole_dgr2.decode.types import DecodeOptions, DecodeResult, Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.forward import forward_cached

QUERIES = (1, 8, 16, 32)
PROBES = 2  # requests decoded with each draft length
LEAST_DRAFT = 4  # a shorter draft length is not tried
SECONDS = 1.0  # time given to the measurement of one batch size
ROUNDS = (2, 20)  # least and most turns, in each of which every number of query tokens has its burst
BURST = 4  # passes of one kind in a row, the first of them untimed: it finds the processor's caches full of another's

MARGIN = 1.1  # what drafts must gain over autoregressive decoding to be chosen: few requests tell little

Decoder = Callable[[Sequence[Request], DecodeOptions], DecodeResult]
_MEASURED: dict[tuple[object, ...], PassCosts] = {}
_TRIED: WeakKeyDictionary[torch.nn.Module, dict[tuple[int, float], Drafts]] = WeakKeyDictionary()


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


@dataclass(frozen=True)
class Drafts:
    """What drafts of one length gave on a few requests.

    tokens_per_pass; queries: query tokens of each pass of a row; answer: mean tokens of an answer.
    """

    length: int
    tokens_per_pass: float
    queries: tuple[int, ...]
    answer: float

    def shared_queries(self, batch: int) -> float:
        """Expected query tokens of a forward that `batch` rows share: the largest of so many rows."""
        ordered = np.sort(np.asarray(self.queries, dtype=float))
        ends = np.arange(len(ordered) + 1) / len(ordered)
        return float(ordered @ np.diff(ends**batch))


@dataclass(frozen=True)
class Decision:
    """Mode, draft length (None: autoregressive), and why, in one sentence."""

    mode: str
    block_size: int | None
    reason: str


def decide(costs: PassCosts, drafts: Sequence[Drafts]) -> Decision:
    """The way with the least expected time a token; autoregressive decoding unless drafts gain MARGIN."""
    alone = costs.of(1)
    times = [costs.of(one.shared_queries(costs.batch)) / one.tokens_per_pass for one in drafts]
    measured = ", ".join(f"c({q}) {1e3 * costs.of(q):.2f}" for q in costs.queries)
    given = f"batch {costs.batch}, ms a pass: {measured}"
    if not drafts or MARGIN * min(times) > alone:
        best = f"drafts give {1e3 * min(times):.2f}" if drafts else "drafts were not tried"
        return Decision(
            "autoregressive", None, f"autoregressive: {1e3 * alone:.2f} ms a token, {best} ({given})"
        )
    index = int(np.argmin(times))
    chosen = drafts[index]
    reason = (
        f"speculative, drafts of {chosen.length}: {1e3 * times[index]:.2f} ms a token against {1e3 * alone:.2f} "
        f"autoregressive ({given}; {chosen.tokens_per_pass:.1f} tokens a pass)"
    )
    return Decision("speculative", chosen.length, reason)


def decode_auto(
    run: Decoder,
    measure: Callable[[float], PassCosts],
    requests: Sequence[Request],
    options: DecodeOptions,
    spec: BlockDiffusionSpec | None,
    known: dict[tuple[int, float], Drafts],
) -> DecodeResult:
    """Measure, try, decide, and decode the rest.

    run: decodes requests in a fixed mode. measure: gives the pass costs for answers of so many tokens. known: what
    drafts of a length gave at a temperature with this model, so that later calls try nothing; it is added to. The time
    of the measurement counts as decoding time (it is taken once a process); so does that of the tries, whose answers
    are kept.
    """
    if not requests:
        return DecodeResult((), 0.0, 0.0)
    plain = replace(options, mode="autoregressive", block_size=None)
    if spec is None or spec.context != "causal":
        why = "the model is not converted" if spec is None else "context 'block' has no exact drafts"
        return replace(run(requests, plain), reason=f"autoregressive: {why}")
    tried = replace(options, mode="speculative")
    lengths = _lengths(options.block_size or spec.block_size)
    parts, at = [], 0
    for length in lengths:
        enough = len(requests) - at >= 2 * PROBES  # at most about half of the requests are spent on tries
        if (length, options.temperature) not in known and enough:
            parts.append(run(requests[at : at + PROBES], replace(tried, block_size=length)))
            at += PROBES
            known[length, options.temperature] = _drafts(length, parts[-1])
    found = [
        known[length, options.temperature] for length in lengths if (length, options.temperature) in known
    ]
    begin = time.perf_counter()
    costs = measure(statistics.fmean(drafts.answer for drafts in found) if found else options.max_new_tokens)
    spent = time.perf_counter() - begin
    tried = replace(tried, token_cost=costs.token_cost)
    decision = decide(costs, [drafts for drafts in found if drafts.tokens_per_pass > 0])
    chosen = plain if decision.block_size is None else replace(tried, block_size=decision.block_size)
    parts.append(run(requests[at:], chosen))
    return DecodeResult(
        tuple(completion for part in parts for completion in part.completions),
        sum(part.prefill_seconds for part in parts),
        sum(part.decode_seconds for part in parts) + spent,
        decision.reason,
    )


def _lengths(longest: int) -> list[int]:
    """Draft lengths to try: the longest and halves of it."""
    return [length for length in (longest, longest // 2, longest // 4) if length >= LEAST_DRAFT]


def known_drafts(model: torch.nn.Module) -> dict[tuple[int, float], Drafts]:
    """What drafts of this model have given so far, by length and temperature; for the life of the model."""
    return _TRIED.setdefault(model, {})


def _drafts(length: int, result: DecodeResult) -> Drafts:
    speculations = [c.speculation for c in result.completions if c.speculation is not None]
    queries = tuple(q for one in speculations for q in one.queries)
    return Drafts(length, result.tokens_per_forward, queries, result.tokens / len(result.completions))


def measure_pass_costs(model: torch.nn.Module, batch: int, context: int) -> PassCosts:
    """Median seconds of a forward of `batch` rows after `context` tokens, at each of QUERIES; about SECONDS in all.

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
    medians = [statistics.median(times[q]) for q in QUERIES]
    return PassCosts(batch, QUERIES, tuple(np.maximum.accumulate(medians).tolist()))


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
