"""Facts by hand on five items, their blindness to later items, and their levels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.evidence import (
    DECAY,
    FACTS,
    FADE,
    RECENT,
    fit_evidence,
    fit_fact_scale,
    measure_facts,
)
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.sequences import Rows, leave_one_out_rows
from tests.reranking import ITEMS, candidates, sequences

SEQUENCES = sequences([1, 2, 3], [2, 3])
EVIDENCE = fit_evidence(SEQUENCES, ITEMS)


def facts_of(ids: list[int], history: list[int], scores: list[float] | None = None) -> dict[str, np.ndarray]:
    found = measure_facts(
        EVIDENCE, candidates([ids], [scores] if scores else None), [np.array(history, dtype=int)]
    )
    return dict(zip(FACTS, found[0].T, strict=True))


def test_cooccurrence_by_hand() -> None:
    """Pairs 1-2 and 1-3 once, 2-3 twice; item 1 has 2 pairs, items 2 and 3 have 3 each."""
    expected = np.zeros((6, 6))
    expected[1, 2] = expected[2, 1] = expected[1, 3] = expected[3, 1] = 1 / math.sqrt(2 * 3)
    expected[2, 3] = expected[3, 2] = 2 / 3
    assert np.allclose(EVIDENCE.neighbours.toarray(), expected)
    far = fit_evidence(sequences([1, 2, 2, 2, 2, 2, 3]), ITEMS).neighbours
    assert far[1, 3] == 0  # six steps apart
    assert far[1, 2] > 0


def test_followers_by_hand() -> None:
    """1, 2, 3 and 2, 3: 2 follows 1 once, 3 follows 2 twice and 1 once two steps later; nothing goes back."""
    expected = np.zeros((6, 6))
    expected[1, 2], expected[2, 3], expected[1, 3] = 1.0, 2.0, FADE
    assert np.allclose(EVIDENCE.followers.toarray(), expected)
    assert fit_evidence(sequences([1, 2, 2, 2, 3]), ITEMS).followers[1, 3] == 0  # four steps later


def test_facts_by_hand() -> None:
    """History red lamp, blue lamp; candidates blue lamp, old chair, no text at all."""
    facts = facts_of([3, 4, 5], [1, 2], [3.0, 1.0, 2.0])
    assert np.allclose(facts["match"], np.array([1, -1, 0]) / math.sqrt(2 / 3))
    assert np.allclose(facts["popular"], [math.log(3), 0, 0])
    assert np.allclose(facts["next"], [math.log(3), 0, 0])
    assert np.allclose(facts["together"], [DECAY / math.sqrt(6), 0, 0])  # of item 1 alone: 2 is the last one
    likeness = (EVIDENCE.text @ EVIDENCE.text.T).toarray()
    assert likeness[3, 2] > likeness[3, 1] > 0
    assert np.allclose(facts["words"], [likeness[3, 2], 0, 0])
    assert np.allclose(facts["alike"], [(likeness[3, 2] + DECAY * likeness[3, 1]) / (1 + DECAY), 0, 0])
    assert np.allclose(facts["brand"], [1 / 2, 0, 0])


def test_padding_is_zero_and_takes_no_part() -> None:
    short, whole = facts_of([3, 4, 0, 0], [1, 2]), facts_of([3, 4], [1, 2])
    for name in FACTS:
        assert short[name][:2].tolist() == whole[name].tolist()
        assert short[name][2:].tolist() == [0, 0]


def test_histories_short_empty_and_long() -> None:
    empty = facts_of([3, 4], [])
    assert all(not empty[name].any() for name in FACTS[2:])
    assert empty["popular"][0] > 0
    recent = [2] * RECENT
    for name, values in facts_of([3, 4], recent).items():
        assert values.tolist() == facts_of([3, 4], [1, 4, 5, *recent])[name].tolist()


def test_no_rows_no_text_no_interactions() -> None:
    none = measure_facts(EVIDENCE, candidates([[3, 4]]).take(slice(0, 0)), [])
    assert none.shape == (0, 2, len(FACTS))
    for title in ("", "!?"):
        blank = ItemText((title,) * 6, ((),) * 6, ("",) * 6)
        evidence = fit_evidence(sequences([], []), blank)
        found = measure_facts(evidence, candidates([[3, 4]]), [np.array([1])])[0]
        assert not found[:, 1:].any()
        assert np.isfinite(found).all()


def test_many_rows_equal_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.permutation(np.arange(1, 6))[:3].tolist() for _ in range(7)]
    histories = [rng.integers(1, 6, size=rng.integers(0, 14)) for _ in range(7)]
    whole = measure_facts(EVIDENCE, candidates(ids), histories)
    monkeypatch.setattr("recbole_dgr2.data.evidence._ROWS_AT_A_TIME", 2)
    assert np.array_equal(measure_facts(EVIDENCE, candidates(ids), histories), whole)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_a_fact_never_sees_what_comes_later(seed: int) -> None:
    """Statistics of the interactions before the rows and histories: targets and later items may be anything."""
    rng = np.random.default_rng(seed)
    users = [rng.integers(1, 6, size=rng.integers(4, 9)).tolist() for _ in range(4)]
    rows = leave_one_out_rows(sequences(*users), "train", 2)
    first = {user: int(rows.ends[rows.users == user].min()) for user in range(1, 5)}

    def facts(later: bool) -> np.ndarray:
        other = [
            [*items[: first[u]], *rng.integers(1, 6, size=len(items) - first[u]).tolist()] if later else items
            for u, items in enumerate(users, 1)
        ]
        seen = sequences(*other)
        kept = np.array([0, *(first[u] for u in range(1, 5))])
        evidence = fit_evidence(seen.truncate(seen.lengths - kept), ITEMS)
        early = Rows(np.arange(1, 5), kept[1:])
        ids = candidates([[1, 2, 3, 4, 5]] * 4)
        return measure_facts(evidence, replace(ids, rows=early), early.histories(seen))

    assert np.array_equal(facts(False), facts(True))


def test_levels_are_in_range_and_rise_with_the_fact() -> None:
    rng = np.random.default_rng(1)
    facts = rng.exponential(size=(50, 4, len(FACTS)))
    facts[..., 2] = np.where(rng.random((50, 4)) < 0.6, 0.0, facts[..., 2])  # often at its minimum
    facts[..., 3] = 2.5  # never varies
    for n_levels in (2, 3, 5, 9):
        scale = fit_fact_scale(facts, n_levels)
        assert [FACTS[fact] for fact in scale.active] == [name for name in FACTS if name != "together"]
        levels = scale.levels(facts)
        assert levels.shape == (50, 4, len(FACTS) - 1)
        assert levels.min() == 0
        assert levels.max() == n_levels - 1
        for column, fact in enumerate(scale.active):
            order = np.argsort(facts[..., fact].ravel())
            assert (np.diff(levels[..., column].ravel()[order]) >= 0).all()
        none = levels[..., scale.active.index(2)][facts[..., 2] == 0]
        assert not none.any()
        outside = scale.levels(facts * 1000 - 500)
        assert outside.min() >= 0
        assert outside.max() <= n_levels - 1


def test_scales_without_variation() -> None:
    scale = fit_fact_scale(np.ones((3, 2, len(FACTS))), 5)
    assert scale.active == ()
    assert scale.levels(np.ones((3, 2, len(FACTS)))).shape == (3, 2, 0)
    assert fit_fact_scale(np.zeros((0, 2, len(FACTS))), 5).active == ()
    with pytest.raises(ValueError, match="fact_levels is 1; expected at least 2"):
        fit_fact_scale(np.ones((3, 2, len(FACTS))), 1)
