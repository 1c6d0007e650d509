"""The report: exact schema, no NaN, whole or no file, and tables with whatever rows there are."""

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from recbole_dgr2.report import tables
from recbole_dgr2.report.evaluation import METRICS, Validity, hit_view
from recbole_dgr2.report.schema import check_report
from recbole_dgr2.report.throughput import Throughput

SCHEMA = {
    "dataset", "retriever", "n_candidates", "n_users", "n_hits", "seed", "versions", "phases", "rows",
}  # fmt: skip
ROW = ["name", "all", "hits", "ci95", "valid_rate", "failures", "decode", "copied", "faithfulness"]
DECODE = [
    "mode", "tau", "block_size", "batch_size", "tokens", "seconds", "tokens_per_second",
    "tokens_per_forward", "speedup_vs_ar",
]  # fmt: skip


def speed(tokens: int, passes: int, seconds: float, speedup: float) -> Throughput:
    return Throughput(
        "x",
        3,
        tokens,
        passes,
        seconds,
        (seconds, seconds),
        0.1,
        tokens / seconds,
        (tokens / seconds,) * 3,
        speedup,
        (speedup, speedup),
        None,
    )


def info(n_hits: int = 40, n: int = 10) -> tables.RunInfo:
    return tables.RunInfo(
        "ml-100k", "ItemKNN", n, 943, n_hits, 2020, {"torch": "2.13", "recbole": "1.2.1"}, {"retriever": 3.25}
    )


def rows(n: int = 10) -> list[tables.Row]:
    ranks = np.arange(40) % n
    everyone = {name: np.float64(0.01 * i) for i, name in enumerate(reversed(METRICS))}
    hits, ci95 = hit_view(ranks, n, samples=200, seed=0)
    counts = {"unparsed": 3, "duplicate": 1, "omission": 1, "out_of_set": 0}
    block = tables.Decode("block", 1, speed(5200, 1000, 4.0, 3.1), tau=0.9, block_size=32)
    ar = tables.Decode("autoregressive", 1, speed(5200, 5200, 12.4, 1.0))
    return [
        tables.Row("conversion", everyone, hits, ci95, Validity(200, 196, counts), block, copied=0.25),
        tables.Row("my_own", everyone),
        tables.Row("retriever", everyone, hits, ci95),
        tables.Row("ar_teacher", everyone, hits, ci95, Validity(200, 200, dict.fromkeys(counts, 0)), ar),
    ]


@pytest.fixture
def report() -> dict[str, Any]:
    return tables.build_report(info(), rows())


def test_schema_is_exact_and_ordered(report: dict[str, Any]) -> None:
    assert set(report) == SCHEMA
    assert list(report["versions"]) == ["recbole", "torch"]
    assert [row["name"] for row in report["rows"]] == ["retriever", "ar_teacher", "conversion", "my_own"]
    for row in report["rows"]:
        assert list(row) == ROW
        assert list(row["all"]) == list(METRICS)
    retriever, teacher, conversion, _ = report["rows"]
    assert (retriever["valid_rate"], retriever["failures"], retriever["decode"]) == (None, {}, None)
    assert list(conversion["decode"]) == DECODE
    assert list(conversion["failures"]) == ["duplicate", "omission", "out_of_set", "unparsed"]
    assert list(conversion["ci95"]) == [*METRICS, "valid_rate"]
    assert conversion["valid_rate"] == 0.98
    assert conversion["decode"] == {
        "mode": "block", "tau": 0.9, "block_size": 32, "batch_size": 1, "tokens": 5200, "seconds": 4.0,
        "tokens_per_second": 1300.0, "tokens_per_forward": 5.2, "speedup_vs_ar": 3.1,
    }  # fmt: skip
    assert (teacher["decode"]["tau"], teacher["decode"]["block_size"]) == (None, None)


def test_json_round_trip_and_stable_bytes(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    tables.write_report(report, path)
    assert json.loads(path.read_text()) == report
    first = path.read_bytes()
    tables.write_report(tables.build_report(info(), list(reversed(rows()))), path)
    assert path.read_bytes() == first
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_write_leaves_the_old_file(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    broken = copy.deepcopy(report)
    broken["rows"][0]["all"]["mrr"] = math.nan
    with pytest.raises(ValueError, match=r"row 'retriever', all\.mrr is nan: a finite number in \[0, 1\]"):
        tables.write_report(broken, path)

    def no_space(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tables.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        tables.write_report(report, path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def change(path: list[Any], value: Any) -> Any:
    def apply(report: dict[str, Any]) -> None:
        entry = report
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(["n_hit"], 3), "unknown key 'n_hit': did you mean 'n_hits'"),
        (lambda report: report.pop("phases"), "lacks 'phases'"),
        (change(["n_hits"], 1000), "n_hits is 1000: at most n_users = 943"),
        (change(["n_hits"], 0), "leave hits empty"),
        (change(["n_users"], 0), "n_users is 0: a whole number >= 1"),
        (change(["seed"], 1.5), "seed is 1.5"),
        (change(["phases", "retriever"], math.inf), "phases.retriever is inf"),
        (change(["rows"], []), "at least one row"),
        (change(["rows", 1, "name"], "retriever"), "no name twice"),
        (change(["rows", 1, "valid_rate"], 98.0), "'ar_teacher', valid_rate is 98.0"),
        (change(["rows", 1, "hits", "mrr"], 1.2), r"hits\.mrr is 1\.2"),
        (change(["rows", 1, "ci95", "mrr"], [0.9, 1.0]), r"ci95\.mrr is \[0\.9, 1\.0\]: two ends around"),
        (change(["rows", 1, "ci95", "map"], [0, 1]), r"ci95\.map"),
        (change(["rows", 1, "failures", "omission"], -1), r"failures\.omission is -1"),
        (change(["rows", 1, "failures"], {}), "failures lacks 'duplicate'"),
        (change(["rows", 1, "decode", "speedup"], 2.0), "did you mean 'speedup_vs_ar'"),
        (change(["rows", 1, "decode", "seconds"], None), r"decode\.seconds is None"),
    ],
)
def test_check_names_the_place(report: dict[str, Any], edit: Any, message: str) -> None:
    check_report(report)
    edit(report)
    with pytest.raises(ValueError, match=message) as error:
        check_report(report)
    assert "\n" not in str(error.value)


def test_markdown_by_eye(report: dict[str, Any]) -> None:
    text = tables.render_markdown(report)
    lines = text.splitlines()
    assert lines[0].startswith("ml-100k, retriever ItemKNN, 10 candidates, seed 2020; 943 users, 40 hits")
    assert "ceiling recall@10 = 0.0424" in lines[0]
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table[:12]}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0] == ["model", "users", *METRICS]
    assert set(cells[1][0]) == {"-"}
    assert cells[3][:4] == ["retriever", "hits", "0.1000", "0.3000"]
    conversion = next(row for row in cells if row[0] == "conversion" and row[1] == "0.9800")
    assert conversion[3:] == [
        "1",
        "1",
        "0",
        "3",
        "0.2500",
        "block",
        "0.9",
        "32",
        "1",
        "5200",
        "4.00",
        "1300.0",
        "5.20",
        "3.10x",
    ]
    teacher = next(row for row in cells if row[0] == "ar_teacher" and row[1] == "1.0000")
    assert teacher[8:11] == ["autoregressive", "-", "-"]
    assert "Seconds: retriever 3.2" in text and "Versions: recbole 1.2.1, torch 2.13" in text
    assert all(line == line.rstrip() for line in lines)


def test_stages_that_kept_their_starting_weights_are_named(report: dict[str, Any]) -> None:
    assert "started from" not in tables.render_markdown(report)
    kept = {**report, "unchanged": [{"stage": "conversion", "parent": "ar_teacher"}]}
    check_report(kept)
    text = tables.render_markdown(kept)
    assert "Stages that ended with the weights they started from: conversion (= ar_teacher)" in text
    with pytest.raises(ValueError, match=r"report\.unchanged\[0\]\.stage is 'distillation'"):
        check_report({**report, "unchanged": [{"stage": "distillation", "parent": "conversion"}]})


def test_small_n_and_missing_rows() -> None:
    report = tables.build_report(info(n=3), [tables.Row("retriever", {}, *hit_view([0, 1, 2], 3, 50, 0))])
    assert list(report["rows"][0]["hits"]) == ["recall@1", "recall@3", "ndcg@3", "mrr"]
    text = tables.render_markdown(report)
    assert "recall@10 " not in text and "ndcg@3" in text and "speed-up" not in text


def test_no_hits_is_said(tmp_path: Path) -> None:
    report = tables.build_report(info(n_hits=0), [tables.Row("retriever", {"recall@1": 0.0})])
    text = tables.render_markdown(report)
    assert "No user has the target among the candidates" in text
    assert "nan" not in text.lower() and "hits 95%" not in text
    tables.write_report(report, tmp_path / "report.json")


def test_terminal_shows_tables_and_a_log_gets_markdown(report: dict[str, Any]) -> None:
    log = io.StringIO()
    tables.print_report(report, Console(file=log, width=60))
    assert log.getvalue() == tables.render_markdown(report)
    screen = io.StringIO()
    tables.print_report(report, Console(file=screen, force_terminal=True, width=200, color_system=None))
    shown = screen.getvalue()
    assert "conversion" in shown and "3.10x" in shown and "|" not in shown


@pytest.mark.parametrize("width", [40, 80, 120])
def test_narrow_terminals_split_tables_and_cut_no_value(report: dict[str, Any], width: int) -> None:
    screen = io.StringIO()
    tables.print_report(report, Console(file=screen, force_terminal=True, width=width, color_system=None))
    shown = screen.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    cells = [
        cell.strip() for line in tables.render_markdown(report).splitlines() for cell in line.split("|")[1:-1]
    ]
    assert all(cell in shown for cell in cells if set(cell) != {"-"})


def test_names_are_plain_text() -> None:
    report = tables.build_report(info(), [tables.Row("[bold]x[/bold]", {"mrr": 0.5})])
    assert "[bold]x[/bold]" in tables.render_markdown(report)
