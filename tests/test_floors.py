"""Floors by phase, their agreement, and their place in the report; paired comparisons beside them."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.report.comparison import Resampling, compare, compare_all, comparison_cells
from recbole_dgr2.report.floors import LEAKY_NOTE, agree, floor_cells, floor_of
from recbole_dgr2.report.schema import check_report
from recbole_dgr2.report.tables import Row, RunInfo, build_report, render_markdown


def slots(first: int, third: int, fifth: int, absent: int) -> np.ndarray:
    return np.repeat([0, 2, 4, 10], [first, third, fifth, absent])


def test_a_floor_by_hand() -> None:
    floor = floor_of(("last_m", "test"), slots(2, 1, 1, 6), 10, 500, 0)
    assert (floor.lists, floor.hits, floor.hit_share) == (10, 4, 0.4)
    assert floor.metrics["recall@1"] == 0.5
    assert floor.metrics["recall@3"] == 0.75
    assert floor.metrics["ndcg@3"] == pytest.approx((2 + 0.5) / 4)
    for name, (low, high) in floor.ci95.items():
        assert low <= floor.metrics[name] <= high
    assert json.loads(json.dumps(floor.to_dict()))["hit_share"] == 0.4


def test_agreement_is_overlap_of_every_interval() -> None:
    same = [floor_of(("last_m", "x"), slots(300 + i, 200, 100, 5), 10, 500, 0) for i in (0, 8)]
    other = floor_of(("leaky", "x"), slots(550, 30, 20, 5), 10, 500, 0)
    none = floor_of(("last_m", "x"), slots(0, 0, 0, 9), 10, 500, 0)
    assert agree(*same)
    assert agree(same[0], other) is False
    assert agree(same[0], none) is None
    assert (none.metrics, none.ci95, none.hit_share) == ({}, {}, 0.0)
    assert floor_of(("last_m", "x"), slots(0, 0, 0, 0), 10, 500, 0).hit_share == 0.0


def test_cells() -> None:
    floors = [floor_of(("leaky", "training"), slots(2, 1, 1, n), 10, 100, 0).to_dict() for n in (0, 4)]
    cells = floor_cells(floors)
    assert cells[0][:5] == ["split", "lists", "number", "hits", "hit share"]
    assert cells[1][:5] == ["leaky", "training", "4", "4", "1.0000"]
    assert cells[2][5].startswith("0.5000 (")
    none = floor_of(("leaky", "training"), slots(0, 0, 0, 3), 10, 100, 0).to_dict()
    assert floor_cells([none])[1][5:] == ["-", "-", "-"]


def report(**extras: Any) -> dict[str, Any]:
    return build_report(RunInfo("toy", "Pop", 10, 10, 4, 0), [Row("retriever"), Row("lambdarank")], extras)


def test_the_report_holds_them_and_old_reports_stay_valid() -> None:
    floor = floor_of(("leaky", "training"), slots(2, 1, 1, 6), 10, 100, 0).to_dict()
    better, worse = np.zeros(40, dtype=int), np.repeat([0, 2], 20)
    entries = compare(("lambdarank", "retriever"), (better, worse), Resampling(10, 500, 0))
    made = report(floors=[floor], comparisons=entries)
    text = render_markdown(made)
    assert LEAKY_NOTE in text
    assert "Paired bootstrap on hits" in text
    assert "+0.5000" in text
    check_report(report())
    plain = dict(made)
    del plain["floors"], plain["comparisons"]
    check_report(plain)
    for section, key, value, message in (
        ("floors", "hits", -1, "floors[0].hits is -1"),
        ("floors", "hit_share", 2.0, "floors[0].hit_share is 2.0"),
        ("comparisons", "p", 1.5, "comparisons[0].p is 1.5"),
        ("comparisons", "ci95", [0.6, 0.7], "two ends around 0.5"),
    ):
        broken = copy.deepcopy(made)
        broken[section][0][key] = value
        with pytest.raises(ValueError, match=re.escape(message)):
            check_report(broken)
    with pytest.raises(ValueError, match=r"unknown key 'floor'.*'floors'"):
        check_report({**made, "floor": []})


def test_comparisons_by_hand() -> None:
    better, worse = np.zeros(40, dtype=int), np.repeat([0, 2], 20)
    entries = compare(("a", "b"), (better, worse), Resampling(10, 500, 0))
    assert [entry["metric"] for entry in entries] == ["recall@1", "recall@3", "ndcg@3"]
    assert [entry["difference"] for entry in entries] == [0.5, 0.0, 0.25]
    assert entries[0]["p"] < 0.01
    assert entries[1]["p"] == 1.0
    header, *cells = comparison_cells(entries)
    assert header[:5] == ["system", "against", "recall@1", "95%", "p"] and len(cells) == 1
    assert cells[0][:3] == ["a", "b", "+0.5000"] and cells[0][5] == "+0.0000"
    assert compare(("a", "b"), (better[:0], worse[:0]), Resampling(10, 500, 0)) == []
    assert [entry["metric"] for entry in compare(("a", "b"), (better, worse), Resampling(2, 100, 0))] == [
        "recall@1"
    ]


def test_who_is_compared_with_whom() -> None:
    """A language model with what costs nothing, a student with its teacher, nothing with what was not ranked."""
    names = ("retriever", "conditional_logit", "ar_teacher", "conversion")
    ranks = {name: np.arange(40) % (place + 2) for place, name in enumerate(names)}
    entries = compare_all(ranks, {"conversion": "ar_teacher"}, Resampling(10, 100, 0))
    pairs = list(dict.fromkeys((entry["a"], entry["b"]) for entry in entries))
    logit, teacher, student = names[1:]
    assert pairs == [
        (logit, "retriever"),
        *((teacher, other) for other in names[:2]),
        *((student, other) for other in names[:3]),
    ]
    (first,) = [e for e in entries if (e["a"], e["b"], e["metric"]) == (student, teacher, "recall@1")]
    assert first["difference"] == pytest.approx(8 / 40 - 10 / 40)
    del ranks[teacher]
    assert teacher not in {
        entry["b"] for entry in compare_all(ranks, {student: teacher}, Resampling(10, 100, 0))
    }
