"""Mode auto: who leaves a race and who wins it, by hand; answers of the ways that were taken; what a call may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from recbole_dgr2.decode import DecodeOptions, DecodeResult, Request, decode
from recbole_dgr2.decode.auto import (
    Gain,
    Known,
    Runner,
    Share,
    decode_auto,
    known_of,
    name_of,
    standing,
    ways_of,
)
from recbole_dgr2.decode.costs import PassCosts
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from tests.decoding import SPEC, options_of, requests_of, run
from tests.tiny import EOS_ID, MASK_ID, tiny_model

FLAT = PassCosts(1, (1, 8, 16, 32), (1.0, 1.1, 1.2, 1.4))
STEEP = PassCosts(64, (1, 8, 16, 32), (1.0, 8.0, 16.0, 32.0))
BLOCK_CONTEXT = BlockDiffusionSpec(8, MASK_ID, "block")
WAYS = ways_of(options_of("auto", tau=0.9, exact=False), BlockDiffusionSpec(32, MASK_ID, "causal"))


def runners(*times: tuple[float, Sequence[float]]) -> list[Runner]:
    """One a pair (expected, seconds a token in each turn), at one token a pass."""
    return [
        Runner(way, expected, [Share(10 * pace, 10, 10) for pace in paces])
        for way, (expected, paces) in zip(WAYS, times, strict=False)
    ]


def test_the_ways_that_may_be_taken() -> None:
    names = [
        "autoregressive",
        *(f"speculative {length}" for length in (32, 16, 8)),
        *(f"block 0.9/{length}" for length in (32, 16, 8)),
    ]
    assert list(map(name_of, WAYS)) == names
    assert [name_of(way) for way in ways_of(options_of("auto", block_size=8), SPEC)] == [
        "autoregressive",
        "speculative 8",
        "speculative 4",  # a quarter of 8 is below the least length
    ]
    assert [way.mode for way in ways_of(options_of("auto"), BLOCK_CONTEXT)] == ["autoregressive"]
    loose = options_of("auto", exact=False, rule="factor", rule_value=2.0)
    assert [name_of(way) for way in ways_of(loose, BLOCK_CONTEXT)] == [
        "autoregressive",
        "block factor=2/8",
        "block factor=2/4",
    ]
    assert len(ways_of(loose, None)) == 1


def test_the_widest_row_sets_the_width_of_a_shared_pass() -> None:
    gain = Gain(3.0, {1: 1, 3: 1}, 20.0)
    assert gain.shared_queries(1) == 2.0
    assert gain.shared_queries(2) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert gain.shared_queries(64) == pytest.approx(3.0)
    assert Gain(3.0, {8: 5}, 20.0).shared_queries(16) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("times", "best", "following"),
    [
        ([(1.0, ())], 0, None),
        ([(1.0, ()), (2.1, ())], 0, None),  # more than twice as much: no race
        ([(1.0, ()), (1.4, ()), (2.1, ())], 0, 0),
        ([(1.0, (3.0,)), (1.4, ()), (2.1, ())], 0, 1),  # nobody is judged before the turn is over
        ([(1.0, (3.0,)), (1.4, (2.0,)), (2.1, ())], 1, None),  # 3 > 1.4 x 2: out, whatever was expected
        ([(1.0, (2.2,)), (1.4, (2.0,))], 1, 0),
        ([(1.0, (2.4, 2.4)), (1.4, (2.0, 2.0))], 1, 0),  # within a quarter: another turn
        ([(1.0, (2.6, 2.6)), (1.4, (2.0, 2.0))], 1, None),
        ([(1.0, (2.3, 2.3, 2.3)), (1.4, (2.0, 2.0, 2.0))], 1, None),
        ([(1.0, (2.04,) * 4), (1.4, (2.0,) * 4)], 1, None),  # within a twentieth, but all turns are over
        ([(1.0, (2.0,) * 4), (1.4, (2.0,) * 4)], 0, None),
    ],
)
def test_the_race_by_hand(
    times: list[tuple[float, Sequence[float]]], best: int, following: int | None
) -> None:
    now = standing(runners(*times))
    assert now.best.way == WAYS[best]
    assert (now.next.way if now.next else None) == (None if following is None else WAYS[following])


def test_a_machine_that_slows_down_between_turns_changes_nothing() -> None:
    steady = standing(runners((1.0, (1.0, 1.0, 1.0, 1.0)), (1.0, (1.04, 1.04, 1.04, 1.04))))
    drifting = standing(runners((1.0, (1.0, 3.0, 9.0, 9.0)), (1.0, (1.04, 3.12, 9.36, 9.36))))
    hiccup = standing(runners((1.0, (1.0, 1.0, 5.0, 1.0)), (1.0, (1.04, 1.04, 1.04, 1.04))))
    assert steady.best.way == drifting.best.way == hiccup.best.way == WAYS[0]


def test_fewer_passes_a_token_count_as_much_as_quicker_passes() -> None:
    slow = Runner(WAYS[0], 1.0, [Share(10.0, 10, 10)] * 4)
    wide = Runner(
        WAYS[1], 1.0, [Share(15.0, 10, 18), Share(15.0, 10, 12)] * 2
    )  # 1.5 a pass, 1.5 tokens a pass
    assert standing([slow, wide]).judged[WAYS[1]] == (pytest.approx(1.0), 4)


class Machine:
    """Decodes with the tiny model; a pass of a row takes the given seconds of its way, 1 where none is given."""

    def __init__(self, spec: BlockDiffusionSpec = SPEC, **seconds: float) -> None:
        self.spec, self.seconds = spec, seconds
        self.calls: list[tuple[str, int]] = []
        self.answers: list[tuple[DecodeOptions, tuple[int, ...]]] = []

    def __call__(self, requests: Sequence[Request], options: DecodeOptions) -> DecodeResult:
        result = decode(tiny_model(), requests, options, eos_id=EOS_ID, spec=self.spec)
        name = name_of(options).replace(" ", "_").replace("0.06/", "")
        self.calls.append((name, len(requests)))
        self.answers += [(options, completion.token_ids) for completion in result.completions]
        return replace(
            result, prefill_seconds=0.0, decode_seconds=self.seconds.get(name, 1.0) * result.passes
        )


def auto_run(
    machine: Machine, count: int, known: Known, costs: PassCosts = FLAT, **more: object
) -> DecodeResult:
    options = options_of("auto", 4, 10, **more)  # type: ignore[arg-type]
    return decode_auto(machine, lambda answer: costs, requests_of([4] * count), options, machine.spec, known)


def test_a_call_tries_races_and_decodes_the_rest() -> None:
    known, even = Known(), replace(FLAT, batch=4, seconds=(1.0, 1.0, 1.0, 1.0))
    machine = Machine(autoregressive=1.0, speculative_8=2.0, speculative_4=1.5)
    auto_run(machine, 60, known, even)
    assert machine.calls[:2] == [("speculative_8", 4), ("speculative_4", 4)]
    race = machine.calls[2:-1]  # a random model's drafts are worth nothing: all three start level
    assert [count for _, count in race] == [16] * len(race)
    assert [name for name, _ in race] == ["autoregressive", "speculative_8", "speculative_4"]
    assert machine.calls[-1] == ("autoregressive", 4)
    machine.calls.clear()
    result = auto_run(machine, 60, known, even)  # what is known is neither tried nor timed again
    assert machine.calls == [("autoregressive", 60)]
    assert result.reason.startswith("autoregressive; ms a token at batch 4: autoregressive ")
    assert "(timed 1x)" in result.reason and "c(8) 1000.00" in result.reason and "\n" not in result.reason


def test_a_race_goes_on_from_call_to_call() -> None:
    known, even = Known(), replace(FLAT, batch=4, seconds=(1.0, 1.0, 1.0, 1.0))
    machine = Machine(speculative_8=5.0, speculative_4=5.0)
    served = [auto_run(machine, 1, known, even) for _ in range(12)]
    assert served[0].reason == "speculative 8: first tries, which left no request to decide for"
    assert len(machine.calls) == 12  # every request is decoded once
    assert machine.calls[-1] == ("autoregressive", 1) and served[-1].reason == served[-2].reason


def test_what_is_too_slow_by_its_passes_is_never_timed() -> None:
    machine = Machine()
    auto_run(machine, 60, Known(), STEEP)
    assert machine.calls == [("speculative_8", 4), ("speculative_4", 4), ("autoregressive", 52)]


def test_exact_and_any_are_judged_apart() -> None:
    """Times of two races are not compared: the machine may have changed between them."""
    known, even = Known(), replace(FLAT, batch=4, seconds=(1.0, 1.0, 1.0, 1.0))
    auto_run(Machine(), 60, known, even)
    before = {key: len(shares) for key, shares in known.shares.items()}
    machine = Machine(block_8=0.01, block_4=0.02)
    result = auto_run(machine, 100, known, even, exact=False)
    assert {name for name, _ in machine.calls[:2]} == {"block_8", "block_4"}  # drafts were tried before
    assert all(len(known.shares[key]) == count for key, count in before.items())
    assert result.reason.startswith("block 0.06/8; ") and machine.calls[-1][0] == "block_8"
    auto_run(machine, 60, known, even, exact=False, tau=0.5)
    assert [name for name, _ in machine.calls if "0.5" in name]  # another threshold is another way


@pytest.mark.parametrize("costs", [FLAT, STEEP])
@pytest.mark.parametrize("count", [1, 3, 4, 9, 30])
def test_output_is_autoregressive_whatever_is_chosen(
    costs: PassCosts, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recbole_dgr2.decode.engine.measure_pass_costs", lambda *arguments: costs)
    monkeypatch.setattr("recbole_dgr2.decode.auto._KNOWN", {})
    requests = requests_of([3 + i % 7 for i in range(count)])
    wanted = run(requests, options_of("autoregressive", 4)).completions
    for _ in range(3):  # tries and turns of the race fall into all of them
        finished: list[int] = []
        result = decode(
            tiny_model(), requests, options_of("auto", 4), eos_id=EOS_ID, spec=SPEC, progress=finished.append
        )
        assert [c.token_ids for c in result.completions] == [c.token_ids for c in wanted]
        assert [c.key for c in result.completions] == [request.key for request in requests]
        assert finished == list(range(1, count + 1))
        assert result.reason


@pytest.mark.parametrize("spec", [SPEC, BLOCK_CONTEXT])
def test_each_answer_is_that_of_the_way_it_was_decoded_in(spec: BlockDiffusionSpec) -> None:
    machine, known = Machine(spec), Known()
    even = replace(FLAT, batch=4, seconds=(1.0, 1.0, 1.0, 1.0))
    result = auto_run(machine, 90, known, even, exact=False)
    requests = requests_of([4] * 90)
    assert [c.token_ids for c in result.completions] == [answer for _, answer in machine.answers]
    modes = {options.mode for options, _ in machine.answers}
    assert modes == (
        {"autoregressive", "speculative", "block"} if spec is SPEC else {"autoregressive", "block"}
    )
    for way in {options for options, _ in machine.answers}:
        own = [index for index, (options, _) in enumerate(machine.answers) if options == way]
        alone = decode(tiny_model(), [requests[index] for index in own], way, eos_id=EOS_ID, spec=spec)
        assert [c.token_ids for c in alone.completions] == [machine.answers[index][1] for index in own]


@pytest.mark.parametrize("spec", [None, BLOCK_CONTEXT])
def test_without_exact_drafts_it_is_autoregressive(spec: BlockDiffusionSpec | None) -> None:
    requests = requests_of([3, 5])
    result = decode(tiny_model(), requests, options_of("auto"), eos_id=EOS_ID, spec=spec)
    wanted = decode(tiny_model(), requests, options_of("autoregressive"), eos_id=EOS_ID, spec=spec)
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in wanted.completions]
    assert result.reason.startswith("autoregressive: ")
    assert decode(tiny_model(), [], options_of("auto"), eos_id=EOS_ID, spec=spec).completions == ()


def test_what_is_known_belongs_to_a_model() -> None:
    one, other = tiny_model(), tiny_model("llama")
    assert known_of(one) is known_of(one)
    assert known_of(one) is not known_of(other)
