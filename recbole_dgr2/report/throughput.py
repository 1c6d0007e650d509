"""Speed of decoders against one another, on the same requests, in the same process.

Machines drift: other work comes and goes, clocks change. So decoders run in turn (A B A B ...), a ratio is
formed only between neighbours of one round, and its median over rounds is reported with its smallest and
largest value. The outputs of the last round come back with the figures: a speed says nothing without the
quality of the same outputs.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class DecodeOutcome(Protocol):
    """What a decoder reports: generated tokens, forward passes after prefill, seconds of both phases."""

    @property
    def tokens(self) -> int: ...
    @property
    def passes(self) -> int: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...


Outcome = TypeVar("Outcome", bound=DecodeOutcome)
RequestT = TypeVar("RequestT")


@dataclass(frozen=True)
class Throughput(Generic[Outcome]):
    """Speed of one decoder over one set of requests.

    Attributes:
        tokens, passes: of one pass over the requests (the middle round).
        seconds, prefill_seconds: medians over rounds; seconds is decoding without prefill.
        seconds_range: smallest and largest decoding seconds.
        tokens_per_second: median over rounds of tokens / decoding seconds.
        rates: tokens / decoding seconds of each round; ratios of one round are free of the machine's drift.
        speedup: median over rounds of this decoder's tokens per second over the baseline's; speedup_range:
            its ends.
        outcome: what the decoder returned in the last round.
    """

    name: str
    rounds: int
    tokens: int
    passes: int
    seconds: float
    seconds_range: tuple[float, float]
    prefill_seconds: float
    tokens_per_second: float
    rates: tuple[float, ...]
    speedup: float
    speedup_range: tuple[float, float]
    outcome: Outcome

    @property
    def tokens_per_forward(self) -> float:
        """Tokens a forward pass, commit passes counted."""
        return self.tokens / self.passes


class NothingTimedError(ValueError):
    """A decoder gave nothing whose speed could be told."""


def measure(
    decoders: Mapping[str, Callable[[Sequence[RequestT]], Outcome]],
    requests: Sequence[RequestT],
    *,
    baseline: str,
    rounds: int = 3,
    warmup_requests: int = 2,
) -> dict[str, Throughput[Outcome]]:
    """Time named decoders in turn over the same requests, after a warm-up of each on the first few.

    Args:
        decoders: name -> callable that decodes a list of requests.
        requests: the work, the same objects in the same order for every decoder and round.
        baseline: name of the decoder that speed-ups are relative to.
        rounds: times each decoder goes through all requests, at least 1.
        warmup_requests: requests decoded untimed by each decoder first; 0 for none.

    Raises:
        ValueError: no requests, or unknown baseline.
        NothingTimedError: a decoder produced nothing, or all of it without a pass after prefill.
    """
    if baseline not in decoders:
        raise ValueError(
            f"speed baseline {baseline!r} is not among the decoders: {', '.join(decoders) or 'none'}"
        )
    if not requests or rounds < 1:
        raise ValueError(f"{len(requests)} requests in {rounds} rounds: speed needs at least one of each")
    if warmup_requests > 0:
        for decoder in decoders.values():
            decoder(requests[:warmup_requests])
    outcomes: dict[str, list[Outcome]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, decoder in decoders.items():
            outcome = decoder(requests)
            _check(name, outcome)
            outcomes[name].append(outcome)
    return {name: _summary(name, own, outcomes[baseline]) for name, own in outcomes.items()}


def _check(name: str, outcome: DecodeOutcome) -> None:
    seconds = outcome.decode_seconds
    if outcome.tokens < 1 or outcome.passes < 1 or not (math.isfinite(seconds) and seconds > 0):
        raise NothingTimedError(
            f"decoder {name!r} gave {outcome.tokens} tokens in {outcome.passes} passes and {seconds} s: "
            "a speed needs more than 0 of each"
        )


def _summary(name: str, own: list[Outcome], base: list[Outcome]) -> Throughput[Outcome]:
    speeds = [outcome.tokens / outcome.decode_seconds for outcome in own]
    ratios = [
        speed / (other.tokens / other.decode_seconds) for speed, other in zip(speeds, base, strict=True)
    ]
    seconds = [outcome.decode_seconds for outcome in own]
    middle = sorted(own, key=lambda outcome: outcome.tokens)[(len(own) - 1) // 2]
    return Throughput(
        name=name,
        rounds=len(own),
        tokens=middle.tokens,
        passes=middle.passes,
        seconds=statistics.median(seconds),
        seconds_range=(min(seconds), max(seconds)),
        prefill_seconds=statistics.median(outcome.prefill_seconds for outcome in own),
        tokens_per_second=statistics.median(speeds),
        rates=tuple(speeds),
        speedup=statistics.median(ratios),
        speedup_range=(min(ratios), max(ratios)),
        outcome=own[-1],
    )
