"""Commit rules against values worked out by hand, and what all of them must keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.decode.commit import commit_set, entropy_bounded, factor, static_schedule, threshold
from recbole_dgr2.decode.types import RULES
from tests.decoding import options_of, requests_of, run

NONE = -1.0  # not masked
SURE = np.array([[NONE, 0.95, 0.5, 0.9, 0.99], [NONE, 0.3, NONE, 0.2, 0.3], [NONE] * 5])


def slots(chosen: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in chosen]


def test_threshold_by_hand() -> None:
    assert slots(threshold(SURE, 0.9)) == [[1, 3, 4], [1], []]
    assert slots(threshold(SURE, 1.0)) == [[4], [1], []]
    assert slots(threshold(SURE, 0.25)) == [[1, 2, 3, 4], [1, 4], []]


def test_static_schedule_by_hand() -> None:
    assert slots(static_schedule(SURE, 2)) == [[1, 4], [1, 4], []]  # 4 slots in 2 passes: 2 a pass
    assert slots(static_schedule(SURE, 3)) == [[1, 4], [1, 4], []]  # rounded up
    assert slots(static_schedule(SURE, 4)) == [[4], [1], []]
    assert slots(static_schedule(SURE, 99)) == [[4], [1], []]


def test_factor_by_hand() -> None:
    # row 0, surest first: 2 * .01 = .02, 3 * .05 = .15, 4 * .1 = .4, 5 * .5 = 2.5
    assert slots(factor(SURE, 0.5)) == [[1, 3, 4], [1], []]
    assert slots(factor(SURE, 0.1)) == [[4], [1], []]
    assert slots(factor(SURE, 3.0)) == [[1, 2, 3, 4], [1, 4], []]  # row 1: 2 * .7, 3 * .7, 4 * .8 = 3.2
    # the largest k counts, even where a smaller one fails: (k + 1)(1 - c) = .6, .3 for two equal ones at f = .5
    assert slots(factor(np.array([[NONE, 0.7, 0.7]]), 1.0)) == [[1, 2]]


def test_entropy_bound_by_hand() -> None:
    entropies = np.array([[np.inf, 0.4, 0.1, 0.2, 1.0], [np.inf, 2.0, np.inf, 3.0, np.inf], [np.inf] * 5])
    # row 0, rising: .1, .2, .4, 1: the sum before each is 0, .1, .3, .7
    assert slots(entropy_bounded(entropies, 0.25)) == [[2, 3], [1], []]
    assert slots(entropy_bounded(entropies, 0.3 + 1e-9)) == [[1, 2, 3], [1], []]
    assert slots(entropy_bounded(entropies, 2.0)) == [[1, 2, 3, 4], [1, 3], []]


@settings(max_examples=80)
@given(
    rule=st.sampled_from(RULES),
    value=st.floats(0.01, 8.0),
    values=st.lists(st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6), min_size=1, max_size=4),
    masked=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=4, max_size=4),
)
def test_every_rule_commits_the_surest_masked_slot_and_no_other_kind(
    rule: str, value: float, values: list[list[float]], masked: list[list[bool]]
) -> None:
    sure = np.array(values)
    hidden = np.array(masked[: len(values)])
    confidences, entropies = np.where(hidden, sure, NONE), np.where(hidden, 1 - sure, np.inf)
    value = max(round(value), 1) if rule == "static" else value
    chosen = commit_set(rule, value, confidences, entropies)
    assert not chosen[~hidden].any()
    for row in range(len(hidden)):
        has_masked = bool(hidden[row].any())
        assert chosen[row].any() == has_masked
        if has_masked:
            assert confidences[row][chosen[row]].max() == confidences[row].max()


@pytest.mark.parametrize(("rule", "value"), [("static", 3), ("factor", 3.0), ("entropy", 8.0)])
def test_rules_decode_and_keep_their_pass_bounds(rule: str, value: float) -> None:
    requests = requests_of([5, 11, 3])
    result = run(requests, options_of(rule=rule, rule_value=value, max_new_tokens=24), eos_id=-1)
    sequential = run(requests, options_of(tau=1.0, max_new_tokens=24), eos_id=-1)
    assert result.passes < sequential.passes
    for completion in result.completions:
        assert len(completion.token_ids) == 24
        if rule == "static":
            assert max(completion.trace.steps) <= 3


def test_threshold_rule_is_the_default() -> None:
    requests = requests_of([5, 11, 3])
    assert run(requests, options_of()).completions == run(requests, options_of(rule="threshold")).completions
