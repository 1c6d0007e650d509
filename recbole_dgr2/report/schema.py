"""The schema of `report.json`: its keys, and the check that every report passes before it is written."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from recbole_dgr2.report.evaluation import FAILURES
from recbole_dgr2.report.faithfulness import MEASURES

RUN_KEYS = ("dataset", "retriever", "n_candidates", "n_users", "n_hits", "seed", "versions", "phases", "rows")
OPTIONAL_KEYS = ("floors", "comparisons", "trimmed", "traces", "unchanged")
"""Keys that later versions added: a report without them is whole."""
FLOOR_KEYS = ("split", "phase", "lists", "hits", "hit_share", "metrics", "ci95")
COMPARISON_KEYS = ("a", "b", "metric", "difference", "ci95", "p")
TRIMMED_KEYS = ("phase", "prompts", "trimmed", "history_items", "candidate_titles")
TRACE_COUNTS = ("lists", "accepted", "attempts", "prompt_tokens", "completion_tokens")
TRACE_KEYS = ("phase", "source", "model", "mode", *TRACE_COUNTS)
UNCHANGED_KEYS = ("stage", "parent")
ROW_KEYS = ("name", "all", "hits", "ci95", "valid_rate", "failures", "decode")
OPTIONAL_ROW_KEYS = ("faithfulness", "copied")
FAITHFULNESS_KEYS = ("value", "ci95", "answers")
SPEED_KEYS = ("tokens", "seconds", "tokens_per_second", "tokens_per_forward", "speedup_vs_ar")
DECODE_KEYS = ("mode", "tau", "block_size", "batch_size", *SPEED_KEYS)


def check_report(report: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, where the report breaks the schema or holds a number that cannot be."""
    _check_keys("report", report, (*RUN_KEYS, *(key for key in OPTIONAL_KEYS if key in report)))
    for key in ("n_candidates", "n_users"):
        _check_count(f"report.{key}", report[key], 1)
    for key in ("n_hits", "seed"):
        _check_count(f"report.{key}", report[key], 0)
    if report["n_hits"] > report["n_users"]:
        raise ValueError(
            f"report.n_hits is {report['n_hits']}: at most n_users = {report['n_users']} is possible"
        )
    for name, seconds in report["phases"].items():
        _check_number(f"report.phases.{name}", seconds)
    names = [row.get("name") for row in report["rows"]]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"report.rows are {names}: at least one row and no name twice is needed")
    for row in report["rows"]:
        _check_row(f"report row {row.get('name')!r}", row, report["n_hits"])
    for place, entry in enumerate(report.get("unchanged", ())):
        _check_keys(f"report.unchanged[{place}]", entry, UNCHANGED_KEYS)
        if entry["stage"] not in names:
            raise ValueError(
                f"report.unchanged[{place}].stage is {entry['stage']!r}: expected one of {names}"
            )
    for place, floor in enumerate(report.get("floors", ())):
        _check_floor(f"report.floors[{place}]", floor)
    for place, entry in enumerate(report.get("comparisons", ())):
        _check_comparison(f"report.comparisons[{place}]", entry)
    for place, entry in enumerate(report.get("trimmed", ())):
        _check_trimmed(f"report.trimmed[{place}]", entry)
    for place, entry in enumerate(report.get("traces", ())):
        _check_keys(f"report.traces[{place}]", entry, TRACE_KEYS)
        for key in TRACE_COUNTS:
            _check_count(f"report.traces[{place}].{key}", entry[key], 0)


def _check_floor(where: str, floor: Mapping[str, Any]) -> None:
    _check_keys(where, floor, FLOOR_KEYS)
    for key in ("lists", "hits"):
        _check_count(f"{where}.{key}", floor[key], 0)
    for name, value in {**floor["metrics"], "hit_share": floor["hit_share"]}.items():
        _check_number(f"{where}.{name}", value, 1.0)


def _check_comparison(where: str, entry: Mapping[str, Any]) -> None:
    _check_keys(where, entry, COMPARISON_KEYS)
    _check_number(f"{where}.p", entry["p"], 1.0)
    ends = entry["ci95"]
    if len(ends) != 2 or not -1 <= ends[0] <= entry["difference"] <= ends[1] <= 1:
        raise ValueError(f"{where}.ci95 is {ends}: two ends around {entry['difference']} are needed")


def _check_trimmed(where: str, entry: Mapping[str, Any]) -> None:
    _check_keys(where, entry, TRIMMED_KEYS)
    for key in TRIMMED_KEYS[1:]:
        _check_count(f"{where}.{key}", entry[key], 0)
    if entry["trimmed"] > entry["prompts"]:
        raise ValueError(
            f"{where}.trimmed is {entry['trimmed']}: at most prompts = {entry['prompts']} is possible"
        )


def _check_faithfulness(where: str, block: Mapping[str, Any]) -> None:
    _check_keys(where, {**dict.fromkeys(MEASURES), **block}, MEASURES)
    for name, entry in block.items():
        _check_keys(f"{where}.{name}", entry, FAITHFULNESS_KEYS)
        _check_count(f"{where}.{name}.answers", entry["answers"], 1)
        ends = entry["ci95"]
        if len(ends) != 2 or not 0 <= ends[0] <= entry["value"] <= ends[1] <= 1:
            raise ValueError(
                f"{where}.{name}.ci95 is {ends}: two ends around the value {entry['value']} are needed"
            )


def _check_row(where: str, row: Mapping[str, Any], n_hits: int) -> None:
    _check_keys(where, row, (*ROW_KEYS, *(key for key in OPTIONAL_ROW_KEYS if key in row)))
    _check_faithfulness(f"{where}, faithfulness", row.get("faithfulness", {}))
    for view in ("all", "hits"):
        for name, value in row[view].items():
            _check_number(f"{where}, {view}.{name}", value, 1.0)
    if row["hits"] and not n_hits:
        raise ValueError(f"{where} has metrics over hits, but n_hits is 0: leave hits empty")
    points = dict(row["hits"])
    if row["valid_rate"] is not None:
        _check_number(f"{where}, valid_rate", row["valid_rate"], 1.0)
        points["valid_rate"] = row["valid_rate"]
    if row.get("copied") is not None:
        _check_number(f"{where}, copied", row["copied"], 1.0)
    for name, ends in row["ci95"].items():
        if name not in points or len(ends) != 2 or not 0 <= ends[0] <= points[name] <= ends[1] <= 1:
            raise ValueError(
                f"{where}, ci95.{name} is {ends}: two ends around the value {points.get(name)} are needed"
            )
    for name, count in row["failures"].items():
        _check_count(f"{where}, failures.{name}", count, 0)
    if row["failures"] or row["valid_rate"] is not None:
        _check_keys(f"{where}, failures", row["failures"], FAILURES)
    if row["decode"] is not None:
        _check_keys(f"{where}, decode", row["decode"], DECODE_KEYS)
        for key in SPEED_KEYS:
            _check_number(f"{where}, decode.{key}", row["decode"][key])


def _check_keys(where: str, entry: Mapping[str, Any], expected: Sequence[str]) -> None:
    for key in entry:
        if key not in expected:
            near = difflib.get_close_matches(str(key), expected, 1, 0)
            raise ValueError(f"{where} has the unknown key {key!r}: did you mean {near[0]!r}?")
    for key in expected:
        if key not in entry:
            raise ValueError(f"{where} lacks {key!r}: the keys are {', '.join(expected)}")


def _check_number(where: str, value: Any, high: float = math.inf) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= high:
        limit = ">= 0" if high == math.inf else f"in [0, {high:g}]"
        raise ValueError(f"{where} is {value!r}: a finite number {limit} is needed")


def _check_count(where: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{where} is {value!r}: a whole number >= {low} is needed")
