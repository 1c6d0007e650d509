"""Candidate splits: no training list comes from interactions that hold its target, and neither do its facts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import fit_evidence, measure_facts
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.parts import (
    CandidateSplit,
    PartedEvidence,
    SplitOptions,
    final_part,
    holdout_lengths,
    training_parts,
    user_folds,
)
from recbole_dgr2.data.sequences import Sequences, leave_one_out_rows
from tests.reranking import ITEMS, candidates, sequences


def split(mode: CandidateSplit, last_m: int = 2, n_folds: int = 3, seed: int = 0) -> SplitOptions:
    return SplitOptions(mode, last_m, n_folds, seed)


def random_sequences(lengths: list[int], n_items: int = 30) -> Sequences:
    rng = np.random.default_rng(len(lengths))
    users = [rng.integers(1, n_items, size=length).tolist() for length in lengths]
    return sequences(*users, n_items=n_items)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=4, max_size=20),
    mode=st.sampled_from(["last_m", "user_folds"]),
    last_m=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_no_part_holds_a_target_it_serves(
    lengths: list[int], mode: CandidateSplit, last_m: int, seed: int
) -> None:
    all_sequences = random_sequences(lengths)
    parts = training_parts(all_sequences, split(mode, last_m, seed=seed))
    assert np.array_equal(sum(part.serves.astype(int) for part in parts), np.ones(all_sequences.n_users))
    rows = leave_one_out_rows(all_sequences, "train", last_m)
    for user, end in zip(rows.users.tolist(), rows.ends.tolist(), strict=True):
        (part,) = (part for part in parts if part.serves[user])
        assert part.lengths[user] <= end  # the target stands at place `end`
    for part in parts:
        assert (part.lengths <= all_sequences.training_lengths()).all()
        assert np.array_equal(part.sequences(all_sequences).lengths, part.lengths)


def test_the_parts_of_each_mode() -> None:
    data = sequences([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2], [5, 4, 3, 2, 1])
    (held,) = training_parts(data, split("last_m", 2))
    assert held.lengths.tolist() == holdout_lengths(data, 2).tolist() == [0, 1, 1, 1, 1]
    (leaky,) = training_parts(data, split("leaky"))
    assert leaky.lengths.tolist() == final_part(data).lengths.tolist() == [0, 3, 2, 2, 3]
    folds = training_parts(data, split("user_folds", n_folds=2))
    assert [part.name for part in folds] == ["fold1of2", "fold2of2"]
    for part in folds:
        assert not part.lengths[part.serves].any()
        assert np.array_equal(part.lengths[~part.serves], leaky.lengths[~part.serves])
    assert not final_part(data).serves.any()


def test_folds_are_even_and_drawn_by_seed() -> None:
    data = random_sequences([5] * 100)
    folds = user_folds(data, 4, 1)
    assert np.ptp(np.bincount(folds)) <= 1
    assert np.array_equal(folds, user_folds(data, 4, 1))
    assert not np.array_equal(folds, user_folds(data, 4, 2))
    with pytest.raises(ValueError, match="n_folds 101: expected 2 to 100, the number of users"):
        user_folds(data, 101, 0)
    with pytest.raises(ValueError, match="candidate_split 'other': expected one of last_m"):
        training_parts(data, split("other"))  # type: ignore[arg-type]


def test_facts_come_from_the_part_that_serves_the_user() -> None:
    data = sequences([1, 2, 3, 4], [2, 3, 4, 1], n_items=6)
    folds = training_parts(data, split("user_folds", n_folds=2))
    evidence = [fit_evidence(part.sequences(data), ITEMS) for part in folds]
    source = PartedEvidence(tuple((part.serves, own) for part, own in zip(folds, evidence, strict=True)))
    lists, histories = candidates([[3, 4], [1, 3]]), [np.array([1, 2]), np.array([2, 3])]
    facts = source.measure(lists, histories)
    for row, user in enumerate((1, 2)):
        own = evidence[0] if folds[0].serves[user] else evidence[1]
        assert np.array_equal(
            facts[row], measure_facts(own, lists.take(slice(row, row + 1)), histories[row : row + 1])[0]
        )


@pytest.mark.parametrize("mode", ["last_m", "user_folds", "leaky"])
def test_no_fact_of_a_training_list_depends_on_its_target(mode: CandidateSplit) -> None:
    """Other items in the places of the targets of one part's lists change none of their facts, except if leaky."""
    text = ItemText(("",) * 30, ((),) * 30, ("",) * 30)
    before = random_sequences([8] * 12)
    rows = leave_one_out_rows(before, "train", 1)
    parts = training_parts(before, split(mode, 1))
    own = rows.take(parts[0].serves[rows.users])
    items = before.items.copy()
    places = before.offsets[own.users] + own.ends
    items[places] = items[places] % 28 + 1
    after = Sequences(before.n_users, before.n_items, before.offsets, items)
    ids = np.random.default_rng(0).integers(1, 30, size=(len(own), 4))
    lists = Candidates(own, ids, np.zeros(ids.shape, dtype=np.float32))
    facts = []
    for data in (before, after):
        evidence = tuple((part.serves, fit_evidence(part.sequences(data), text)) for part in parts)
        facts.append(PartedEvidence(evidence).measure(lists, own.histories(before)))
    assert np.array_equal(facts[0], facts[1]) == (mode != "leaky")
