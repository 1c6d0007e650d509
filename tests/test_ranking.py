"""Raw answers of every kind become permutations, and what was wrong with them is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbole_dgr2.data.prompt import label
from recbole_dgr2.data.ranking import FAILURES, Failure, Ranking, identity_ranking, parse_ranking, reward


def answer(slots: Sequence[int | str], explanation: object = "why") -> str:
    names = [label(slot) if isinstance(slot, int) else slot for slot in slots]
    return "<think>text</think>" + json.dumps({"explanation": explanation, "recommendations": names})


@pytest.mark.parametrize(
    "slots,order,failures",
    [
        ([2, 0, 1], (2, 0, 1), ()),
        ([2, 2, 0, 1], (2, 0, 1), ("duplicate",)),
        ([2], (2, 0, 1), ("omission",)),
        ([2, 2], (2, 0, 1), ("duplicate", "omission")),
        ([], (0, 1, 2), ("omission",)),
        ([1, 3, 0, 2], (1, 0, 2), ("out_of_set",)),
        ([1, "", "c1", "<c0>", 0, 2], (1, 0, 2), ("out_of_set",)),
        ([5, 1, 1], (1, 0, 2), ("duplicate", "omission", "out_of_set")),
    ],
)
def test_lists(slots: list[int | str], order: tuple[int, ...], failures: tuple[Failure, ...]) -> None:
    assert parse_ranking(answer(slots), 3, True) == Ranking(order, not failures, failures)
    cut = parse_ranking(answer(slots), 3, False)
    assert cut == Ranking(order, False, (*failures, "unparsed"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[1, 2]",
        '{"recommendations": ["<c1>"',
        '{"recommendation": ["<c1>"]}',
        '{"recommendations": "<c1>"}',
        '{"recommendations": [1, 2, 3]}',
        '{"recommendations": ["<c1>", null]}',
        '{"recommendations": {"<c1>": 1}}',
        '["{"]',
        '{"a":' * 5000,
        '{"a":' + "[" * 5000,
        '{"a":' + "9" * 5000 + "}",
    ],
)
def test_unparsed(text: str) -> None:
    assert parse_ranking(text, 3, True) == Ranking((0, 1, 2), False, ("unparsed",))


def test_the_last_object_counts() -> None:
    first, second = answer([0, 1, 2]), answer([2, 1, 0])
    assert parse_ranking(first + second, 3, True).order == (2, 1, 0)
    assert parse_ranking(second + " {broken " + first, 3, True).order == (0, 1, 2)
    assert parse_ranking(second + " {broken", 3, True) == Ranking((2, 1, 0), True, ())
    assert parse_ranking(first + "{}", 3, True).failures == ("unparsed",)
    assert parse_ranking("9" * 5000 + first, 3, True).valid


@pytest.mark.parametrize(
    "explanation", ["a {b} c", "{", "}{", "{}", '{"recommendations": []}', {"a": {"recommendations": []}}]
)
def test_braces_in_the_explanation(explanation: object) -> None:
    assert parse_ranking(answer([2, 0, 1], explanation), 3, True) == Ranking((2, 0, 1), True, ())


@given(st.lists(st.integers(0, 6), max_size=9), st.integers(1, 5), st.booleans())
def test_always_a_permutation_and_valid_if_it_is_the_raw_answer(
    slots: list[int], n: int, finished: bool
) -> None:
    ranking = parse_ranking(answer(slots), n, finished)
    assert sorted(ranking.order) == list(range(n))
    assert ranking.valid == (finished and sorted(slots) == list(range(n)))
    assert ranking.valid == (not ranking.failures)
    if ranking.valid:
        assert list(ranking.order) == slots
    kept = [slot for slot in dict.fromkeys(slots) if slot < n]
    assert list(ranking.order[: len(kept)]) == kept
    assert list(ranking.order[len(kept) :]) == sorted(ranking.order[len(kept) :])


@given(st.text(alphabet='{}[]",:<>c12 recommendations'), st.integers(1, 4), st.booleans())
def test_any_text_gives_a_permutation(text: str, n: int, finished: bool) -> None:
    ranking = parse_ranking(text, n, finished)
    assert sorted(ranking.order) == list(range(n))
    assert set(ranking.failures) <= set(FAILURES)


def test_identity() -> None:
    assert identity_ranking(3) == Ranking((0, 1, 2), True, ())
    assert identity_ranking(0) == Ranking((), True, ())


def test_reward_by_hand() -> None:
    """Diffusion-GR2, Eq. 3: (before - after) / N, and 0.2 for a list that parses and lifts the target."""
    assert reward(4, 1, 10, True) == pytest.approx(0.3 + 0.2)
    assert reward(1, 4, 10, True) == pytest.approx(-0.3)
    assert reward(0, 0, 10, True) == pytest.approx(0.2)
    assert reward(9, 0, 10, True) == pytest.approx(0.9 + 0.2)
    assert reward(4, 1, 10, False) == -1


def test_copying_the_floor_earns_nothing() -> None:
    order = identity_ranking(10).order
    assert [reward(slot, order.index(slot), 10, True) for slot in range(10)] == [0.2] + [0.0] * 9
