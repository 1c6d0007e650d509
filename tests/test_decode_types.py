"""Options are checked when they are made; a result adds up its completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recbole_dgr2.decode import Completion, DecodeOptions, DecodeResult, DecodingTrace, Speculation


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "diffusion"),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("batch_size", 0),
        ("tau", 0.0),
        ("tau", -0.1),
        ("tau", 1.01),
        ("tau", float("nan")),
        ("block_size", 0),
        ("block_size", 2.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("seed", -1),
        ("rule", "magic"),
        ("rule_value", 3.0),
        ("token_cost", 0.0),
        ("token_cost", float("inf")),
        ("label_ids", (3, 4, 3)),
        ("exact", False),
        ("exact", 0),
    ],
)
def test_bad_option_is_a_one_line_error_that_names_it(field: str, value: object) -> None:
    fields: dict[str, Any] = {"mode": "block", "max_new_tokens": 8, "batch_size": 2, field: value}
    with pytest.raises(ValueError, match=field) as error:
        DecodeOptions(**fields)
    assert "\n" not in str(error.value)
    assert repr(value) in str(error.value)


def test_borders_are_accepted() -> None:
    DecodeOptions("block", 1, 1, tau=1.0, block_size=1, temperature=0.0, seed=0)
    DecodeOptions("autoregressive", 1, 1, tau=1e-9, temperature=2.5)


@pytest.mark.parametrize("value", [None, 0, -1.0, True, float("inf"), 2.5])
def test_a_rule_needs_its_number(value: object) -> None:
    with pytest.raises(ValueError, match="rule_value") as error:
        DecodeOptions("block", 8, 2, rule="static", rule_value=value)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    DecodeOptions("block", 8, 2, rule="static", rule_value=4)
    DecodeOptions("block", 8, 2, rule="factor", rule_value=0.5)


def test_labels_are_for_block_mode() -> None:
    with pytest.raises(ValueError, match="label_ids need mode 'block', got mode 'speculative'"):
        DecodeOptions("speculative", 8, 2, label_ids=(3, 4))


@pytest.mark.parametrize("mode", ["autoregressive", "block", "speculative"])
def test_only_auto_has_a_choice_to_be_exact(mode: Any) -> None:
    with pytest.raises(ValueError, match=f"exact=False needs mode 'auto', got mode '{mode}'"):
        DecodeOptions(mode, 8, 2, exact=False)
    DecodeOptions("auto", 8, 2, exact=False)


def test_acceptance_is_counted_over_all_rows() -> None:
    rows = [Speculation((0, 4, 4), (0, 4, 1), (8, 12, 12)), Speculation((0, 2), (0, 0), (8, 10)), None]
    done = tuple(replace(completion(4, 2), speculation=row) for row in rows)
    assert DecodeResult(done, 1.0, 1.0).acceptance_rate == 0.5
    assert DecodeResult((completion(4, 2),), 1.0, 1.0).acceptance_rate == 0.0


def completion(tokens: int, passes: int) -> Completion:
    trace = DecodingTrace((5,) * tokens, (0,) * tokens, (0.0,) * tokens, (1.0,) * tokens, 1, 0.9, 0.0)
    return Completion(1, (5,) * tokens, True, passes, trace)


def test_result_sums() -> None:
    result = DecodeResult((completion(6, 2), completion(4, 2)), prefill_seconds=1.0, decode_seconds=2.0)
    assert (result.tokens, result.passes) == (10, 4)
    assert result.tokens_per_forward == 2.5
    assert result.tokens_per_second == 5.0


def test_passes_are_counted_by_their_tokens() -> None:
    drafted = replace(completion(4, 3), speculation=Speculation((0, 4, 4), (0, 4, 1), (8, 12, 12)))
    told = completion(4, 3)
    told = replace(told, trace=replace(told.trace, passes=(1, 2, 3, 3), block_size=8))
    assert DecodeResult((drafted, told, told), 1.0, 1.0).queries == {8: 7, 12: 2}
    assert DecodeResult((completion(4, 3),), 1.0, 1.0).queries == {}  # a trace without passes


def test_result_without_passes_or_completions() -> None:
    assert DecodeResult((completion(1, 0),), 1.0, 0.0).tokens_per_forward == 0.0
    empty = DecodeResult((), 0.0, 0.0)
    assert (empty.tokens, empty.passes, empty.tokens_per_forward, empty.tokens_per_second) == (0, 0, 0.0, 0.0)
