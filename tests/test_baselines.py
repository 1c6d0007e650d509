"""Second-stage baselines: they find a planted signal, choose on validation alone, and never read a test target."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

import numpy as np
import pytest

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.sequences import Phase, Rows
from recbole_dgr2.pipeline import baselines
from recbole_dgr2.pipeline.baselines import (
    RankingData,
    assess_baselines,
    fit_conditional_logit,
    fit_lambdarank,
)
from recbole_dgr2.report.assessment import Panel
from recbole_dgr2.report.comparison import Resampling, compare_all

N = 6
needs_lightgbm = pytest.mark.skipif(importlib.util.find_spec("lightgbm") is None, reason="extra `baselines`")


def planted(lists: int, seed: int) -> RankingData:
    """The target is the candidate with the most of fact 3, nine times in ten; a tenth of the lists has no hit."""
    rng = np.random.default_rng(seed)
    facts = rng.random((lists, N, len(FACTS)))
    best = facts[..., 3].argmax(axis=1)
    slots = np.where(rng.random(lists) < 0.9, best, rng.integers(0, N, lists))
    slots[rng.random(lists) < 0.1] = N
    return RankingData(facts, rng.integers(1, 50, (lists, N)), slots)


PHASES: dict[Phase, RankingData] = {
    "train": planted(600, 0),
    "valid": planted(200, 1),
    "test": planted(200, 2),
}


def panel() -> Panel:
    test = PHASES["test"]
    targets = np.where(test.slots < N, test.ids[np.arange(200), np.minimum(test.slots, N - 1)], 99)
    ids = np.argsort(np.random.default_rng(3).random((200, N)), axis=1) + 1
    targets = np.where(test.slots < N, ids[np.arange(200), np.minimum(test.slots, N - 1)], 99)
    candidates = Candidates(
        Rows(np.arange(200), np.ones(200, dtype=np.int64)), ids, np.zeros(ids.shape, np.float32)
    )
    return Panel(candidates, targets, ids, np.arange(10), lambda lists: {"recall@1": 0.5}, 200, 0)


@needs_lightgbm
def test_both_find_the_signal() -> None:
    made = panel()
    rows, logit = assess_baselines(made, PHASES, 5)
    assert logit is not None
    assert [row.name for row in rows] == ["conditional_logit", "lambdarank"]
    for row in rows:
        assert row.hits["recall@1"] > 0.6  # of 6 candidates
        assert np.mean(np.array(row.ranks) == 0) == row.hits["recall@1"]
    ranks = {"retriever": made.ranks[made.hits], **{row.name: np.array(row.ranks) for row in rows}}
    comparisons = compare_all(ranks, {}, Resampling(N, 200, 0))
    first = {entry["a"]: entry for entry in comparisons if entry["metric"] == "recall@1"}
    assert list(first) == ["conditional_logit", "lambdarank"]
    assert all(entry["p"] < 0.01 and entry["difference"] > 0.3 for entry in first.values())


@needs_lightgbm
def test_test_targets_are_not_read_and_results_repeat() -> None:
    other = {**PHASES, "test": replace(PHASES["test"], slots=np.zeros(200, dtype=np.int64))}
    first, second = fit_lambdarank(PHASES, 0), fit_lambdarank(other, 0)
    assert first is not None
    assert second is not None
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]
    logits = [fit_conditional_logit(phases, 5) for phases in (PHASES, other)]
    values = [logit.utilities(PHASES["test"].facts) for logit in logits if logit]
    assert np.array_equal(values[0], values[1])


def test_the_penalty_is_chosen_on_validation() -> None:
    chosen = fit_conditional_logit(PHASES, 5)
    without = fit_conditional_logit({**PHASES, "valid": PHASES["valid"].take(np.arange(0))}, 5)
    assert chosen is not None
    assert without is not None
    assert chosen.l2 in baselines.PENALTIES
    assert without.l2 == 5.0


def test_no_hits_no_baseline() -> None:
    none = replace(PHASES["train"], slots=np.full(600, N))
    assert fit_conditional_logit({**PHASES, "train": none}, 5) is None
    assert assess_baselines(panel(), {**PHASES, "train": none}, 5) == ([], None)


def test_without_lightgbm_it_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        rows, _ = assess_baselines(panel(), PHASES, 5)
    assert [row.name for row in rows] == ["conditional_logit"]
    assert "pip install 'recbole_dgr2[baselines]'" in caplog.text


def test_empty_slots_come_last_and_ties_keep_the_order() -> None:
    data = RankingData(np.zeros((1, 4, 1)), np.array([[7, 0, 8, 9]]), np.array([4]))
    assert data.orders(np.array([[1.0, 9.0, 1.0, 2.0]])).tolist() == [[3, 0, 2, 1]]
