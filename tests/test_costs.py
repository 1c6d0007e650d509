"""Pass costs: between and beyond what was measured, and measured once."""

from __future__ import annotations

import pytest

from recbole_dgr2.decode import costs as costs_module
from recbole_dgr2.decode.costs import PassCosts, measure_pass_costs
from tests.tiny import tiny_model

FLAT = PassCosts(1, (1, 8, 16, 32), (1.0, 1.1, 1.2, 1.4))


def test_costs_are_linear_between_and_beyond_the_measured_ones() -> None:
    assert FLAT.of(1) == 1.0
    assert FLAT.of(12) == pytest.approx(1.15)
    assert FLAT.of(64) == pytest.approx(1.4 + 32 * 0.0125)
    assert PassCosts(1, (1, 2, 3), (1.0, 1.5, 2.0)).token_cost == pytest.approx(1.0)  # .5 + .5 q
    assert FLAT.token_cost == pytest.approx(0.0125, rel=0.1)
    assert PassCosts(1, (1, 8), (1.0, 1.0)).token_cost == 1e-3


def test_costs_are_measured_once_for_a_model_a_batch_and_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(costs_module, "_MEASURED", {})
    monkeypatch.setattr(costs_module, "SECONDS", 0.0)
    real = costs_module._measure
    monkeypatch.setattr(costs_module, "_measure", lambda m, b, c: measured.append((b, c)) or real(m, b, c))  # type: ignore[func-returns-value]
    costs = measure_pass_costs(tiny_model(), 2, 20)
    assert costs.batch == 2
    assert costs.queries == costs_module.QUERIES
    assert 0 < costs.seconds[0] <= costs.seconds[1] <= costs.seconds[2] <= costs.seconds[3]
    assert measure_pass_costs(tiny_model(), 2, 30) is costs  # the same power of two
    measure_pass_costs(tiny_model(), 2, 60)
    measure_pass_costs(tiny_model(), 3, 20)
    measure_pass_costs(tiny_model("llama"), 2, 20)
    assert measured == [(2, 20), (2, 60), (3, 20), (2, 20)]
