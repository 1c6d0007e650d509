"""Mode "auto": the quickest of the ways that may be taken, on this machine, for this model and batch.

Three steps, each sharper than the one before and done on fewer ways. All answers are kept.
1. Tries: each way decodes a few requests, which tells its tokens a pass.
2. The time of a forward is measured once for each (model shape, machine settings, batch) as a function of its query
   tokens. With the tries it says what each way should take, give or take a half on a busy machine.
3. A race of the ways that could be the quickest by that: they decode shares of the waiting requests in turn and are
   timed; after each turn the slower ones leave. Ways that race are close, so that a long race loses little.
What was found out is kept for the life of the model, or until `forget`: a later call goes on where the last one ended,
and once the race is over it costs nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from recbole_dgr2.decode.costs import PassCosts
from recbole_dgr2.decode.types import DecodeOptions, DecodeResult, Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec

TRIES = 4  # requests of the first step, for each way
LEAST_LENGTH = 4  # a shorter half of the block length is not tried
LEAST_SHARE = 16  # requests of a share at small batches
# before turn k of a race, ways above CLOSE[k] times the least time leave; a single share may be a hiccup of the machine
CLOSE = (2.0, 1.4, 1.25, 1.1, 1.0)
SETTLE = 20  # most calls that a decoder is given to make up its mind

Decoder = Callable[[Sequence[Request], DecodeOptions], DecodeResult]
_KNOWN: WeakKeyDictionary[torch.nn.Module, Known] = WeakKeyDictionary()


@dataclass(frozen=True)
class Gain:
    """What a way gave on a few requests, on any machine.

    tokens_per_pass; queries: number of passes by the query tokens of a row; answer: mean tokens of an answer.
    """

    tokens_per_pass: float
    queries: Mapping[int, int]
    answer: float

    def shared_queries(self, batch: int) -> float:
        """Expected query tokens of a forward that `batch` rows share: the largest of so many rows."""
        values = sorted(self.queries)
        ends = np.cumsum([0, *(self.queries[value] for value in values)]) / sum(self.queries.values())
        return float(np.asarray(values) @ np.diff(ends**batch))


AUTOREGRESSIVE = Gain(1.0, {1: 1}, 0.0)  # known without a try


class Share(NamedTuple):
    """Requests that a way decoded in a turn of the race: seconds without prefill, passes of all rows, tokens."""

    seconds: float
    passes: int
    tokens: int


@dataclass
class Known:
    """What was found out about ways (options of a fixed mode, see `_key`) with one model so far.

    shares: of each race; ways that are compared are timed next to one another, so what another race timed is not used.
    """

    gains: dict[DecodeOptions, Gain] = field(default_factory=dict)
    shares: dict[tuple[bool, DecodeOptions], list[Share]] = field(default_factory=dict)


@dataclass(frozen=True)
class Runner:
    """A way in a race; expected: seconds a token of the whole batch, by the cost of its passes."""

    way: DecodeOptions
    expected: float
    shares: Sequence[Share] = ()

    def passes_a_token(self, turns: int) -> float:
        """Over all requests of the first turns, for it depends on the requests alone."""
        shares = self.shares[:turns]
        return sum(share.passes for share in shares) / sum(share.tokens for share in shares)


@dataclass(frozen=True)
class Standing:
    """Where a race is.

    best: the quickest so far. next: the one whose turn it is, None once the race is over. judged: seconds a token of
    each way, and the turns it was judged by, when it left or was judged last; 0 turns: as expected.
    """

    best: Runner
    next: Runner | None
    judged: Mapping[DecodeOptions, tuple[float, int]]


def standing(runners: Sequence[Runner]) -> Standing:
    """Replay a race from its shares: who left before which turn, and who is next."""
    left = list(runners)
    judged: dict[DecodeOptions, tuple[float, int]] = {}
    for turn, close in enumerate(CLOSE):
        times = _seconds_a_token(left, turn)
        judged |= {one.way: (seconds, turn) for one, seconds in zip(left, times, strict=True)}
        best = left[int(np.argmin(times))]
        left = [one for one, seconds in zip(left, times, strict=True) if seconds <= close * min(times)]
        waiting = [one for one in left if len(one.shares) <= turn]
        if len(left) == 1 or turn + 1 == len(CLOSE):
            break
        if waiting:
            return Standing(best, waiting[0], judged)
    return Standing(best, None, judged)


def _seconds_a_token(runners: Sequence[Runner], turns: int) -> list[float]:
    """By the first `turns` shares of each; as expected before the first.

    Machines drift, so the pace of a pass is taken relative to the others in the same turn, and the median over turns.
    """
    if not turns:
        return [one.expected for one in runners]
    paces = np.array([[s.seconds / s.passes for s in one.shares[:turns]] for one in runners])
    mean = paces.mean(axis=0)
    relative = np.median(paces / mean, axis=1) * np.median(mean)
    return [float(pace) * one.passes_a_token(turns) for pace, one in zip(relative, runners, strict=True)]


def ways_of(options: DecodeOptions, spec: BlockDiffusionSpec | None) -> list[DecodeOptions]:
    """Options of every way that "auto" may take, autoregressive decoding first."""
    plain = replace(options, mode="autoregressive", block_size=None, exact=True)
    if spec is None:
        return [plain]
    longest = options.block_size or spec.block_size
    lengths = [
        longest,
        *(length for length in (longest // 2, longest // 4) if length >= LEAST_LENGTH),
    ]
    drafts = [replace(plain, mode="speculative", block_size=length) for length in lengths]
    blocks = [replace(plain, mode="block", block_size=length) for length in lengths]
    return [plain, *(drafts if spec.context == "causal" else []), *([] if options.exact else blocks)]


def name_of(way: DecodeOptions) -> str:
    """Such as "autoregressive", "speculative 16", "block 0.9/16", "block factor=1/16"."""
    if way.mode == "autoregressive":
        return way.mode
    rule = f"{way.tau:g}" if way.rule_value is None else f"{way.rule}={way.rule_value:g}"
    return f"speculative {way.block_size}" if way.mode == "speculative" else f"block {rule}/{way.block_size}"


@dataclass
class _Line:
    """Requests of one call, in line, and the results of those that were taken from it."""

    run: Decoder
    requests: Sequence[Request]
    parts: list[DecodeResult] = field(default_factory=list)
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.requests) - self.at

    def take(self, count: int, way: DecodeOptions) -> DecodeResult:
        part = self.run(self.requests[self.at : self.at + count], way)
        self.at += len(part.completions)
        self.parts.append(part)
        return part


def decode_auto(
    run: Decoder,
    measure: Callable[[float], PassCosts],
    requests: Sequence[Request],
    options: DecodeOptions,
    spec: BlockDiffusionSpec | None,
    known: Known,
) -> DecodeResult:
    """Try, measure, race, and decode the rest in the quickest way.

    run: decodes requests in a fixed mode. measure: gives the pass costs for answers of so many tokens. known: of this
    model; it is added to. The time of the measurement counts as decoding time (it is taken once a process).
    """
    if not requests:
        return DecodeResult((), 0.0, 0.0)
    plain, *others = ways_of(options, spec)
    if not others:
        why = "the model is not converted" if spec is None else "context 'block' has no exact drafts"
        return replace(run(requests, plain), reason=f"autoregressive: {why}")
    line, spent = _Line(run, requests), 0.0
    tried = _try(line, others, known)
    reason = f"{', '.join(map(name_of, tried))}: first tries, which left no request to decide for"
    if line.left:
        begin = time.perf_counter()
        gains = {way: known.gains[_key(way, 1)] for way in others if _key(way, 1) in known.gains}
        answers = [gain.answer for gain in gains.values()] or [options.max_new_tokens]
        costs = measure(statistics.fmean(answers))
        spent = time.perf_counter() - begin
        reason = _race(line, {plain: AUTOREGRESSIVE, **gains}, costs, known, options.exact)
    return DecodeResult(
        tuple(completion for part in line.parts for completion in part.completions),
        sum(part.prefill_seconds for part in line.parts),
        sum(part.decode_seconds for part in line.parts) + spent,
        reason,
    )


def _try(line: _Line, ways: Sequence[DecodeOptions], known: Known) -> list[DecodeOptions]:
    """Decode a few requests in every way not known yet, as long as there are requests; the ways tried."""
    tried = [way for way in ways if _key(way, 1) not in known.gains][: -(-line.left // TRIES)]
    for way in tried:
        result = line.take(TRIES, way)
        if result.passes:  # else each answer was one token, which says nothing
            answer = result.tokens / len(result.completions)
            known.gains[_key(way, 1)] = Gain(result.tokens_per_forward, result.queries, answer)
    return tried


def _race(
    line: _Line, gains: Mapping[DecodeOptions, Gain], costs: PassCosts, known: Known, exact: bool
) -> str:
    """Decode all that is left, share by share while the race goes on; why the last of it was decoded as it was."""
    batch = costs.batch
    share = min(max(2 * batch, LEAST_SHARE), len(line.requests))
    runners = [
        Runner(
            replace(way, token_cost=costs.token_cost),
            costs.of(gain.shared_queries(batch)) / batch / gain.tokens_per_pass,
            known.shares.setdefault((exact, _key(way, batch)), []),
        )
        for way, gain in gains.items()
    ]
    now = standing(runners)
    while now.next is not None and line.left >= share:
        result = line.take(share, now.next.way)
        if not result.passes:  # each answer was one token: no way is quicker than another
            break
        shares = known.shares[exact, _key(now.next.way, batch)]
        shares.append(Share(result.decode_seconds, result.passes, result.tokens))
        now = standing(runners)
    if line.left:
        line.take(line.left, now.best.way)
    timed = sum(len(one.shares) for one in runners)
    state = "" if now.next is None else f"; the race goes on after {timed} shares"
    return _reason(now, costs) + state


def _reason(now: Standing, costs: PassCosts) -> str:
    ordered = sorted(now.judged.items(), key=lambda item: (item[0] != now.best.way, -item[1][1], item[1][0]))
    times = ", ".join(
        f"{name_of(way)} {1e3 * seconds:.3f} ({f'timed {turns}x' if turns else 'expected'})"
        for way, (seconds, turns) in ordered
    )
    passes = ", ".join(f"c({q}) {1e3 * costs.of(q):.2f}" for q in costs.queries)
    return f"{name_of(now.best.way)}; ms a token at batch {costs.batch}: {times}; ms a pass: {passes}"


def _key(way: DecodeOptions, batch: int) -> DecodeOptions:
    """A way without what does not tell it from another one."""
    return replace(way, batch_size=batch, seed=0, token_cost=1.0)


def settle(decoder: Callable[[Sequence[Request]], DecodeResult], requests: Sequence[Request]) -> DecodeResult:
    """Call an "auto" decoder until what it says of its choice stays the same; the result of the first call."""
    first = last = decoder(requests)
    for _ in range(SETTLE - 1):
        reason, last = last.reason, decoder(requests)
        if last.reason == reason:
            break
    return first


def forget(model: torch.nn.Module) -> None:
    """Forget what was found out about a model: to be called when its weights have changed."""
    _KNOWN.pop(model, None)


def known_of(model: torch.nn.Module) -> Known:
    """What was found out about this model so far; for the life of the model."""
    return _KNOWN.setdefault(model, Known())
