"""Interleaved timing, on decoders whose seconds are made up."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from recbole_dgr2.report.throughput import NothingTimedError, Throughput, measure


@dataclass(frozen=True)
class Outcome:
    tokens: int
    passes: int
    decode_seconds: float
    prefill_seconds: float = 0.5


class FakeDecoder:
    """Replays outcomes, one a timed call, and notes who was called with what."""

    def __init__(self, name: str, outcomes: list[Outcome], log: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.outcomes, self.log, self.calls = name, outcomes, log, 0

    def __call__(self, requests: Sequence[int]) -> Outcome:
        self.log.append((self.name, tuple(requests)))
        outcome = self.outcomes[self.calls % len(self.outcomes)]
        self.calls += 1
        return outcome


def run(ar: list[Outcome], block: list[Outcome], **options: int) -> tuple[dict[str, Throughput], list]:
    log: list[tuple[str, tuple[int, ...]]] = []
    decoders = {"ar": FakeDecoder("ar", ar, log), "block": FakeDecoder("block", block, log)}
    return measure(decoders, [1, 2, 3], baseline="ar", **options), log


def test_decoders_take_turns_on_the_same_requests_after_a_warm_up() -> None:
    _, log = run([Outcome(10, 10, 1.0)], [Outcome(10, 5, 1.0)], rounds=2, warmup_requests=2)
    assert log[:2] == [("ar", (1, 2)), ("block", (1, 2))]
    assert log[2:] == [("ar", (1, 2, 3)), ("block", (1, 2, 3))] * 2
    _, log = run([Outcome(10, 10, 1.0)], [Outcome(10, 5, 1.0)], rounds=1, warmup_requests=0)
    assert len(log) == 2


def test_medians_and_pairwise_ratios_by_hand() -> None:
    # the machine slows down threefold in round 2: ratios 4, 5, 3 of neighbours stay, means would not
    ar = [Outcome(100, 100, 1.0), Outcome(100, 100, 3.0), Outcome(100, 100, 1.2)]
    block = [Outcome(120, 40, 0.3), Outcome(120, 40, 0.72), Outcome(120, 40, 0.48)]
    speeds, _ = run(ar, block, rounds=3, warmup_requests=0)
    fast, slow = speeds["block"], speeds["ar"]
    assert (slow.speedup, slow.speedup_range) == (1.0, (1.0, 1.0))
    assert fast.speedup == pytest.approx(4.0)
    assert fast.speedup_range == pytest.approx((3.0, 5.0))
    assert (fast.tokens, fast.passes, fast.tokens_per_forward, fast.rounds) == (120, 40, 3.0, 3)
    assert (fast.seconds, fast.seconds_range, fast.prefill_seconds) == (0.48, (0.3, 0.72), 0.5)
    assert fast.tokens_per_second == pytest.approx(120 / 0.48)
    assert fast.rates == pytest.approx((400.0, 120 / 0.72, 250.0))
    assert fast.outcome is block[-1]


def test_equal_decoders_have_speedup_one() -> None:
    outcomes = [Outcome(64, 64, 0.7), Outcome(64, 64, 0.9)]
    speeds, _ = run(outcomes, outcomes, rounds=2, warmup_requests=0)
    assert speeds["block"].speedup == 1.0 and speeds["block"].speedup_range == (1.0, 1.0)


@pytest.mark.parametrize(
    "bad", [Outcome(0, 3, 1.0), Outcome(3, 0, 1.0), Outcome(3, 3, 0.0), Outcome(3, 3, float("nan"))]
)
def test_nothing_to_measure_is_an_error(bad: Outcome) -> None:
    with pytest.raises(NothingTimedError, match="decoder 'block' gave") as error:
        run([Outcome(10, 10, 1.0)], [bad], warmup_requests=0)
    assert "\n" not in str(error.value)


def test_bad_input() -> None:
    decoder = FakeDecoder("ar", [Outcome(1, 1, 1.0)], [])
    with pytest.raises(ValueError, match="baseline 'autoregressive' is not among the decoders: ar"):
        measure({"ar": decoder}, [1], baseline="autoregressive")
    with pytest.raises(ValueError, match="0 requests in 3 rounds"):
        measure({"ar": decoder}, [], baseline="ar")
    with pytest.raises(ValueError, match="1 requests in 0 rounds"):
        measure({"ar": decoder}, [1], baseline="ar", rounds=0)
