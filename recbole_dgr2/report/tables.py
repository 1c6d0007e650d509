"""`report.json`, checked before it is written, and its two tables for the terminal and for Markdown pages."""

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recbole_dgr2.report.acceptance import trace_lines
from recbole_dgr2.report.comparison import comparison_cells
from recbole_dgr2.report.evaluation import FAILURES, METRICS, Validity
from recbole_dgr2.report.faithfulness import Measured, faithfulness_cells
from recbole_dgr2.report.floors import LEAKY_NOTE, floor_cells
from recbole_dgr2.report.schema import DECODE_KEYS, RUN_KEYS, SPEED_KEYS, check_report
from recbole_dgr2.report.significance import Interval
from recbole_dgr2.report.throughput import Throughput
from recbole_dgr2.report.trimming import trimmed_line

ROW_ORDER = (
    "retriever",
    "conditional_logit",
    "lambdarank",
    "ar_teacher",
    "ar_teacher_rl",
    "naive",
    "conversion",
    "distillation",
    "reinforcement",
)
_MISSING = "-"


@dataclass(frozen=True)
class RunInfo:
    """What the rows share: users evaluated, hits (target among the candidates), wall seconds a phase."""

    dataset: str
    retriever: str
    n_candidates: int
    n_users: int
    n_hits: int
    seed: int
    versions: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decode:
    """How a row was decoded and how fast; tau and block size (of drafts, in mode speculative) are None in
    the modes autoregressive, and auto, which chooses."""

    mode: str
    batch_size: int
    speed: Throughput[Any]
    tau: float | None = None
    block_size: int | None = None


@dataclass(frozen=True)
class Row:
    """One system. The retriever has neither validity nor decode; what was not measured stays empty or None.

    Attributes:
        all_users: metrics of RecBole's evaluator (`standard_metrics`).
        hits, ci95: `hit_view`; both empty where no user is a hit.
        validity, faithfulness: of the raw answers. decode: of the timed requests.
        ranks: of the target of each hit, 0-based, in the order of the panel's hits; not written into the report.
        copied: share of the valid answers that only repeat the input order; None without a valid one.
    """

    name: str
    all_users: Mapping[str, float] = field(default_factory=dict)
    hits: Mapping[str, float] = field(default_factory=dict)
    ci95: Mapping[str, Interval] = field(default_factory=dict)
    validity: Validity | None = None
    decode: Decode | None = None
    faithfulness: Mapping[str, Measured] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    copied: float | None = None


def build_report(
    run: RunInfo, rows: Iterable[Row], extras: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, Any]:
    """The report as plain JSON values, checked; rows in the order of the stages, metrics in a fixed order.

    `ci95` also holds the Wilson interval of `valid_rate`. Where something was not measured, maps are empty
    and `valid_rate` and `decode` are None. `extras` holds the keys of OPTIONAL_KEYS, plain values already.

    Raises:
        ValueError: one line that names the row, the key and what was expected.
    """
    place = {name: i for i, name in enumerate(ROW_ORDER)}
    ordered = sorted(rows, key=lambda row: place.get(row.name, len(place)))
    report: dict[str, Any] = {key: _plain(getattr(run, key)) for key in RUN_KEYS[:6]}
    report["versions"] = dict(sorted(run.versions.items()))
    report["phases"] = {name: _plain(seconds) for name, seconds in run.phases.items()}
    report["rows"] = [_row_entry(row) for row in ordered]
    report.update({key: list(entries) for key, entries in (extras or {}).items()})
    check_report(report)
    return report


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Check the report and write it as JSON, whole or not at all (a file beside it, then a rename)."""
    check_report(report)
    text = json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Show the report: ruled tables on a terminal, Markdown anywhere else, so that a log can be pasted."""
    console = console or Console()
    if not console.is_terminal:
        console.file.write(render_markdown(report))
        return
    for part in _parts(report):
        if isinstance(part, str):
            console.print(Text(part))
        else:
            for piece in part.fitting(console.width):
                console.print(piece.table(box.SIMPLE_HEAD), "")


def render_markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown text with aligned tables."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=10_000, color_system=None, force_terminal=False, legacy_windows=False
    )
    for part in _parts(report):
        console.print(Text(f"{part}\n") if isinstance(part, str) else part.table(box.MARKDOWN))
    lines = [line.rstrip() for line in stream.getvalue().strip().splitlines()]
    kept = [line for i, line in enumerate(lines) if line or lines[i - 1]]
    return "\n".join(kept) + "\n"


@dataclass(frozen=True)
class _Grid:
    """Cells of a table, the header first; the first `left` columns name the row."""

    cells: list[list[str]]
    left: int

    def table(self, style: box.Box) -> Table:
        """A rich table; cells are plain text, so brackets in a name are no markup."""
        markdown = style is box.MARKDOWN
        table = Table(box=style, pad_edge=markdown, show_edge=markdown)
        for i, name in enumerate(self.cells[0]):
            table.add_column(Text(name), justify="left" if i < self.left else "right", no_wrap=True)
        for row in self.cells[1:]:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def fitting(self, width: int) -> list["_Grid"]:
        """The same cells as tables no wider than a terminal, the naming columns repeated in each."""
        widths = [max(map(len, column)) + 3 for column in zip(*self.cells, strict=True)]
        groups: list[list[int]] = []
        names = list(range(self.left))
        for i in range(self.left, len(widths)):
            if not groups or sum(widths[k] for k in (*names, *groups[-1], i)) > width:
                groups.append([])
            groups[-1].append(i)
        return [_Grid([[row[k] for k in names + group] for row in self.cells], self.left) for group in groups]


def _parts(report: Mapping[str, Any]) -> list[str | _Grid]:
    n, users, hits = report["n_candidates"], report["n_users"], report["n_hits"]
    head = (
        f"{report['dataset']}, retriever {report['retriever']}, {n} candidates, seed {report['seed']}; "
        f"{users} users, {hits} hits (target among the candidates: ceiling recall@{n} = {hits / users:.4f})"
    )
    parts: list[str | _Grid] = [head, _accuracy_grid(report["rows"])]
    if not hits:
        parts.append("No user has the target among the candidates: there are no metrics over hits.")
    if any(row["valid_rate"] is not None or row["decode"] for row in report["rows"]):
        parts.append(_answer_grid(report["rows"]))
    if report.get("unchanged"):
        kept = ("{stage} (= {parent})".format(**entry) for entry in report["unchanged"])
        parts.append(f"Stages that ended with the weights they started from: {', '.join(kept)}")
    if any(row.get("faithfulness") for row in report["rows"]):
        parts += [
            "Faithfulness of the reasoning (95 % intervals):",
            _Grid(faithfulness_cells(report["rows"]), 1),
        ]
    if report.get("comparisons"):
        parts += ["Paired bootstrap on hits:", _Grid(comparison_cells(report["comparisons"]), 2)]
    if report.get("floors"):
        parts += [
            "The retriever's own order on hits (95 % intervals):",
            _Grid(floor_cells(report["floors"]), 2),
        ]
        if any(floor["split"] == "leaky" for floor in report["floors"]):
            parts.append(LEAKY_NOTE)
    if report.get("trimmed"):
        parts.append(trimmed_line(report["trimmed"]))
    if report.get("traces"):
        parts.append(trace_lines(report["traces"]))
    if report["phases"]:
        parts.append(
            "Seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in report["phases"].items())
        )
    if report["versions"]:
        parts.append(
            "Versions: " + ", ".join(f"{name} {value}" for name, value in report["versions"].items())
        )
    return parts


def _accuracy_grid(rows: Sequence[Mapping[str, Any]]) -> _Grid:
    columns = [name for name in METRICS if any(name in row["all"] or name in row["hits"] for row in rows)]
    cells = [["model", "users", *columns]]
    for row in rows:
        cells.append([row["name"], "all", *(_number(row["all"].get(name), 4) for name in columns)])
        if row["hits"]:
            cells.append([row["name"], "hits", *(_number(row["hits"].get(name), 4) for name in columns)])
        if any(name in row["ci95"] for name in columns):
            cells.append([row["name"], "hits 95%", *(_range(row["ci95"].get(name)) for name in columns)])
    return _Grid(cells, 2)


def _answer_grid(rows: Sequence[Mapping[str, Any]]) -> _Grid:
    speed = ("mode", "tau", "block", "batch", "tokens", "seconds", "tok/s", "tok/pass", "speed-up")
    cells = [["model", "valid", "valid 95%", *FAILURES, "copied", *speed]]
    for row in rows:
        if row["valid_rate"] is None and not row["decode"]:
            continue
        counts = [_number(row["failures"].get(kind), 0) for kind in FAILURES]
        validity = [_number(row["valid_rate"], 4), _range(row["ci95"].get("valid_rate")), *counts]
        copied = _number(row.get("copied"), 4)
        cells.append([row["name"], *validity, copied, *_speed_cells(row["decode"])])
    return _Grid(cells, 1)


def _speed_cells(decode: Mapping[str, Any] | None) -> list[str]:
    if not decode:
        return [_MISSING] * 9
    tau = _MISSING if decode["tau"] is None else f"{decode['tau']:g}"
    digits = {"block_size": 0, "batch_size": 0, "tokens": 0, "seconds": 2, "tokens_per_second": 1}
    numbers = [_number(decode[key], places) for key, places in digits.items()]
    speedup = f"{decode['speedup_vs_ar']:.2f}x"
    return [decode["mode"], tau, *numbers, _number(decode["tokens_per_forward"], 2), speedup]


def _number(value: float | None, places: int) -> str:
    return _MISSING if value is None else f"{value:.{places}f}"


def _range(interval: Sequence[float] | None) -> str:
    return _MISSING if interval is None else "-".join(f"{end:.3f}".removeprefix("0") for end in interval)


def _row_entry(row: Row) -> dict[str, Any]:
    ci95 = {name: list(row.ci95[name]) for name in _sorted_metrics(row.ci95)}
    if row.validity:
        ci95["valid_rate"] = list(row.validity.interval)
    return {
        "name": row.name,
        "all": {name: _plain(row.all_users[name]) for name in _sorted_metrics(row.all_users)},
        "hits": {name: _plain(row.hits[name]) for name in _sorted_metrics(row.hits)},
        "ci95": {name: [_plain(end) for end in ends] for name, ends in ci95.items()},
        "valid_rate": row.validity.rate if row.validity else None,
        "failures": {kind: _plain(row.validity.failures[kind]) for kind in FAILURES} if row.validity else {},
        "decode": _decode_entry(row.decode) if row.decode else None,
        "copied": row.copied,
        "faithfulness": {name: measured.to_dict() for name, measured in row.faithfulness.items()},
    }


def _decode_entry(decode: Decode) -> dict[str, Any]:
    settings = {key: _plain(getattr(decode, key)) for key in DECODE_KEYS[:4]}
    measured = {key: _plain(getattr(decode.speed, key.removesuffix("_vs_ar"))) for key in SPEED_KEYS}
    return {**settings, **measured}


def _sorted_metrics(metrics: Mapping[str, Any]) -> list[str]:
    place = {name: i for i, name in enumerate(METRICS)}
    return sorted(metrics, key=lambda name: (place.get(name, len(place)), name))


def _plain(value: Any) -> Any:
    """A numpy scalar as the Python number JSON knows."""
    return value.item() if hasattr(value, "item") else value
