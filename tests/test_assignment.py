"""The assignment decoder: found lists, best permutations, and raw tokens left in the trace."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from recbole_dgr2.decode.assignment import answer_slots, assign_labels
from tests.decoding import options_of, requests_of, run, script_model
from tests.tiny import EOS_ID

LABELS = (30, 31, 32, 33)


def test_the_list_at_the_end_is_found() -> None:
    assert answer_slots([5, 30, 6, 31, 9, 32, 7, 31, 7, 33, 8, EOS_ID], LABELS) == [5, 7, 9]
    assert answer_slots([30, 31, 32, 33], LABELS) == [0, 1, 2, 3]
    assert answer_slots([5, 30, 5], LABELS) == [1]
    assert answer_slots([5, 6], LABELS) == []


def test_the_assignment_has_the_largest_sum_of_log_probabilities() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        tokens = [7, 30, 8, 30, 8, 31, 8, 30, EOS_ID]
        log_probs = np.log(generator.dirichlet(np.ones(4), size=len(tokens)))
        got = assign_labels(tokens, LABELS, log_probs)
        places = [1, 3, 5, 7]
        best = max(permutations(range(4)), key=lambda p: sum(log_probs[places[i], p[i]] for i in range(4)))
        assert [got[place] for place in places] == [LABELS[i] for i in best]
        assert [token for i, token in enumerate(got) if i not in places] == [7, 8, 8, 8, EOS_ID]


def test_a_valid_list_of_sure_labels_stays_and_an_impossible_label_is_no_error() -> None:
    tokens = (32, 8, 30, 8, 31)
    log_probs = np.full((5, 4), -np.inf)
    for slot, label in ((0, 2), (2, 0), (4, 1)):
        log_probs[slot, label] = 0.0
    assert assign_labels(tokens, LABELS, log_probs) == tokens


def test_more_places_than_labels_stay_as_they_are() -> None:
    tokens = (30, 30, 31)
    assert assign_labels(tokens, LABELS[:2], np.zeros((3, 2))) == tokens


def test_block_decoding_assigns_and_keeps_the_raw_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [20, 30, 9, 30, 9, 31, EOS_ID]
    script_model(monkeypatch, 4, tokens, [12.0] * 3 + [3.0] + [12.0] * 3)
    options = options_of(tau=0.5, label_ids=LABELS)
    (got,) = run(requests_of([4]), options).completions
    assert got.trace.tokens[:7] == tuple(tokens)
    assert got.token_ids == (20, 30, 9, 32, 9, 31, EOS_ID)  # the unsure second 30 gives way
    (plain,) = run(requests_of([4]), options_of(tau=0.5)).completions
    assert plain.token_ids == tuple(tokens)
