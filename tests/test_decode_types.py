"""Options are checked when they are made; a result adds up its completions."""

from __future__ import annotations

from typing import Any

import pytest

from recbole_dgr2.decode import Completion, DecodeOptions, DecodeResult, DecodingTrace


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


def completion(tokens: int, passes: int) -> Completion:
    trace = DecodingTrace((5,) * tokens, (0,) * tokens, (0.0,) * tokens, (1.0,) * tokens, 1, 0.9, 0.0)
    return Completion(1, (5,) * tokens, True, passes, trace)


def test_result_sums() -> None:
    result = DecodeResult((completion(6, 2), completion(4, 2)), prefill_seconds=1.0, decode_seconds=2.0)
    assert (result.tokens, result.passes) == (10, 4)
    assert result.tokens_per_forward == 2.5
    assert result.tokens_per_second == 5.0


def test_result_without_passes_or_completions() -> None:
    assert DecodeResult((completion(1, 0),), 1.0, 0.0).tokens_per_forward == 0.0
    empty = DecodeResult((), 0.0, 0.0)
    assert (empty.tokens, empty.passes, empty.tokens_per_forward, empty.tokens_per_second) == (0, 0, 0.0, 0.0)
