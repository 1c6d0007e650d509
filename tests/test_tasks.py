"""Tasks: what a model may know of a list, and nothing more."""

from __future__ import annotations

import numpy as np

from recbole_dgr2.data.evidence import FACTS, fit_evidence, fit_fact_scale, measure_facts
from recbole_dgr2.data.tasks import TaskBuilder
from tests.reranking import ITEMS, candidates, sequences

EVIDENCE = fit_evidence(sequences([1, 2, 3], [2, 3], [3, 4]), ITEMS)
LISTS = candidates([[3, 4, 1], [5, 1, 0], [0, 0, 0]])
HISTORIES = [np.array([1, 2, 4]), np.array([3]), np.array([], dtype=int)]
SCALE = fit_fact_scale(measure_facts(EVIDENCE, LISTS, HISTORIES), 3)


def test_tasks_hold_recent_history_and_real_candidates() -> None:
    builder = TaskBuilder(EVIDENCE, SCALE, history_length=2)
    first, second, third = builder.build(LISTS, HISTORIES)
    assert (first.history, first.candidates) == ((2, 4), (3, 4, 1))
    assert (second.history, second.candidates) == ((3,), (5, 1))
    assert (third.history, third.candidates) == ((), ())
    for task in (first, second, third):
        assert task.levels.shape == (len(task.candidates), len(task.fact_names))
        assert set(task.fact_names) <= set(FACTS)
        assert task.fact_names == builder.fact_names
        assert all(type(item) is int for item in (task.key, *task.history, *task.candidates))
    assert np.array_equal(builder.levels(LISTS, HISTORIES)[1, :2], second.levels)


def test_keys_name_the_list_not_its_place() -> None:
    builder = TaskBuilder(EVIDENCE, SCALE, history_length=2)
    keys = [task.key for task in builder.build(LISTS, HISTORIES)]
    assert len(set(keys)) == 3
    back = builder.build(LISTS.take(np.array([2, 0])), [HISTORIES[2], HISTORIES[0]])
    assert [task.key for task in back] == [keys[2], keys[0]]
    assert builder.build(LISTS.take(slice(0, 0)), []) == []
