"""Mode auto: the cheapest way from given costs, exact output whatever it picks, and costs measured once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recbole_dgr2.decode import DecodeOptions, DecodeResult, Request, auto, decode
from recbole_dgr2.decode.auto import Drafts, PassCosts, decide, decode_auto, measure_pass_costs
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from tests.decoding import SPEC, options_of, requests_of, run
from tests.tiny import EOS_ID, MASK_ID, tiny_model

FLAT = PassCosts(1, (1, 8, 16, 32), (1.0, 1.1, 1.2, 1.4))
STEEP = PassCosts(64, (1, 8, 16, 32), (1.0, 8.0, 16.0, 32.0))
LONG, SHORT = Drafts(32, 8.0, (32, 40, 40), 20.0), Drafts(8, 3.0, (8, 12, 12), 20.0)


def test_costs_are_linear_between_and_beyond_the_measured_ones() -> None:
    assert FLAT.of(1) == 1.0
    assert FLAT.of(12) == pytest.approx(1.15)
    assert FLAT.of(64) == pytest.approx(1.4 + 32 * 0.0125)
    assert PassCosts(1, (1, 2, 3), (1.0, 1.5, 2.0)).token_cost == pytest.approx(1.0)  # .5 + .5 q
    assert FLAT.token_cost == pytest.approx(0.0125, rel=0.1)
    assert PassCosts(1, (1, 8), (1.0, 1.0)).token_cost == 1e-3


def test_the_widest_row_sets_the_width_of_a_shared_pass() -> None:
    drafts = Drafts(8, 3.0, (1, 3), 20.0)
    assert drafts.shared_queries(1) == 2.0
    assert drafts.shared_queries(2) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert drafts.shared_queries(64) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("costs", "drafts", "mode", "length"),
    [
        (FLAT, [LONG, SHORT], "speculative", 32),  # 1.47 / 8 against 1.13 / 3 against 1
        (STEEP, [LONG, SHORT], "autoregressive", None),  # 40 / 8, 12 / 3, 1
        (PassCosts(4, (1, 8, 16, 32), (1.0, 1.2, 4.0, 12.0)), [LONG, SHORT], "speculative", 8),
        (FLAT, [], "autoregressive", None),
        (FLAT, [Drafts(8, 1.05, (1,), 20.0)], "autoregressive", None),  # too small a gain: the simplest
    ],
)
def test_the_cheapest_is_chosen_and_says_why(
    costs: PassCosts, drafts: list[Drafts], mode: str, length: int | None
) -> None:
    decision = decide(costs, drafts)
    assert (decision.mode, decision.block_size) == (mode, length)
    assert decision.reason.startswith(mode)
    assert f"batch {costs.batch}" in decision.reason
    assert "\n" not in decision.reason


@pytest.mark.parametrize("costs", [FLAT, STEEP])
@pytest.mark.parametrize("count", [1, 3, 4, 9, 30])
def test_output_is_autoregressive_whatever_is_chosen(
    costs: PassCosts, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recbole_dgr2.decode.engine.measure_pass_costs", lambda *arguments: costs)
    requests = requests_of([3 + i % 7 for i in range(count)])
    finished: list[int] = []
    result = decode(
        tiny_model(), requests, options_of("auto", 4), eos_id=EOS_ID, spec=SPEC, progress=finished.append
    )
    wanted = run(requests, options_of("autoregressive", 4)).completions
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in wanted]
    assert [c.key for c in result.completions] == [request.key for request in requests]
    assert finished == list(range(1, count + 1))
    assert result.reason


def test_the_tries_and_the_rest_are_run_as_decided() -> None:
    calls: list[tuple[int, str, int | None, float]] = []
    requests, real = requests_of([4] * 20), tiny_model()

    def work(part: Sequence[Request], options: DecodeOptions) -> DecodeResult:
        calls.append((len(part), options.mode, options.block_size, options.token_cost))
        return decode(real, part, options, eos_id=EOS_ID, spec=SPEC)

    options = options_of("auto", 4, token_cost=0.5)
    known: dict[tuple[int, float], Drafts] = {}
    result = decode_auto(work, lambda answer: STEEP, requests, options, SPEC, known)
    assert calls[:2] == [
        (2, "speculative", 8, 0.5),
        (2, "speculative", 4, 0.5),
    ]  # a quarter of 8 is below the least length
    assert calls[2] == (16, "autoregressive", None, 0.5)
    assert result.decode_seconds > 0
    assert sorted(known) == [(4, 0.0), (8, 0.0)]
    del calls[:]
    decode_auto(
        work, lambda answer: STEEP, requests, options, SPEC, known
    )  # what is known is not tried again
    assert [count for count, *_ in calls] == [20]


@pytest.mark.parametrize("spec", [None, BlockDiffusionSpec(8, MASK_ID, "block")])
def test_without_exact_drafts_it_is_autoregressive(spec: BlockDiffusionSpec | None) -> None:
    requests = requests_of([3, 5])
    result = decode(tiny_model(), requests, options_of("auto"), eos_id=EOS_ID, spec=spec)
    wanted = decode(tiny_model(), requests, options_of("autoregressive"), eos_id=EOS_ID, spec=spec)
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in wanted.completions]
    assert result.reason.startswith("autoregressive: ")
    assert decode(tiny_model(), [], options_of("auto"), eos_id=EOS_ID, spec=spec).completions == ()


def test_costs_are_measured_once_for_a_model_a_batch_and_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(auto, "_MEASURED", {})
    monkeypatch.setattr(auto, "SECONDS", 0.0)
    real = auto._measure
    monkeypatch.setattr(auto, "_measure", lambda m, b, c: measured.append((b, c)) or real(m, b, c))  # type: ignore[func-returns-value]
    costs = measure_pass_costs(tiny_model(), 2, 20)
    assert costs.batch == 2
    assert costs.queries == auto.QUERIES
    assert 0 < costs.seconds[0] <= costs.seconds[1] <= costs.seconds[2] <= costs.seconds[3]
    assert measure_pass_costs(tiny_model(), 2, 30) is costs  # the same power of two
    measure_pass_costs(tiny_model(), 2, 60)
    measure_pass_costs(tiny_model(), 3, 20)
    measure_pass_costs(tiny_model("llama"), 2, 20)
    assert measured == [(2, 20), (2, 60), (3, 20), (2, 20)]
