"""The page, plots and trace of a speed benchmark, from what `python -m recbole_dgr2.speed` found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recbole_dgr2.report.benchmark_page import markdown
from recbole_dgr2.report.plots import plot_frontier, plot_speedups
from recbole_dgr2.report.speed import (
    auto_cells,
    cost_cells,
    curves_of,
    implied_cells,
    losses,
    points_of,
    quality_cells,
    speed_cells,
)
from recbole_dgr2.report.trace_view import View, write_html
from recbole_dgr2.system.cache import write_text

HEADINGS = {
    "modes": ("Batch 1", "batch"),
    "batch": ("Batch size", "batch"),
    "output": ("Output length", "output"),
}
EXPLAINED = (
    "Speed-ups are over autoregressive decoding of the same weights by the same engine (`autoregressive`), in the same "
    "process, in turn with it: medians over {rounds} rounds, the range beside them, prefill apart; {threads} torch "
    "thread(s). tok/pass counts every forward pass of a row after prefill, commit and verification passes included. "
    "`= AR`: share of outputs that are the autoregressive ones token for token. valid: raw answers that are a "
    "permutation of the candidates. repeated: share of repeated 4-grams. `generate` is Hugging Face's own loop; "
    "`synchronised` decodes blocks with rows that wait for one another."
)

AUTO_EXPLAINED = (
    "`auto` against the best fixed decoder that it may take (`auto any`: block decoding too, whose answers may "
    "differ). choice: the decoder that it took, run as a fixed one, against the best; against best: `auto` itself. "
    "Medians of the ratios within a round, and the range of these; the best of several is also the luckiest of them, "
    "so a few percent are noise. First call: speed of the call that tried and compared, against the later ones."
)


def write_page(result: Mapping[str, Any], views: Sequence[View], folder: Path) -> str:
    """Write speed.json, speed.md, the plots and speed_trace.html into the folder; give the page's text."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "speed.json", json.dumps(result, indent=1) + "\n")
    write_html(views, folder / "speed_trace.html")
    tables = result["tables"]
    plots = _plots(tables, result["quality"], folder)
    text = "\n".join([*_head(result), *_body(result), *_tail(result, plots)]) + "\n"
    write_text(folder / "speed.md", text)
    return text


def _head(result: Mapping[str, Any]) -> list[str]:
    return [
        "# Speed of the decoders",
        "",
        f"{result['model']}; prompts: test lists of {result['dataset']}, candidates of {result['retriever']}.",
        "",
        EXPLAINED.format(**result),
        "",
    ]


def _body(result: Mapping[str, Any]) -> list[str]:
    lines = []
    if result["quality"]:
        lines += ["## Quality", "", "Validity and equality over random users, accuracy over hits.", ""]
        lines += [*markdown(quality_cells(result["quality"])), ""]
    for name, (heading, setting) in HEADINGS.items():
        entries = result["tables"][name]
        if entries:
            lines += [f"## {heading}", "", *markdown(speed_cells(entries, setting)), ""]
            told = [f"- {entry['decoder']}: {entry['reason']}" for entry in entries if entry["reason"]]
            lines += [*dict.fromkeys(told), ""]
            cells = auto_cells(entries)
            if len(cells) > 1:
                lines += [AUTO_EXPLAINED, "", *markdown(cells), ""]
    lines += ["## Where parallel decoding does not pay", ""]
    lost = [
        line for name, (_, setting) in HEADINGS.items() for line in losses(result["tables"][name], setting)
    ]
    lines += [*(list(dict.fromkeys(lost)) or ["Nowhere in these sweeps."]), ""]
    if result["costs"]:
        lines += ["## Cost of a pass", "", "Of q tokens a row, after a prompt of usual length.", ""]
        lines += [*markdown(cost_cells(result["costs"])), ""]
    if result["inputs"]:
        lines += ["## Input length", ""]
        lines += [
            "What the passes of batch 1 would gain after longer prompts, from the cost of a pass there.",
            "",
        ]
        lines += [*markdown(implied_cells(result["inputs"])), ""]
    return lines


def _tail(result: Mapping[str, Any], plots: Sequence[str]) -> list[str]:
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    return [
        *(f"![{name}]({name}.png)" for name in plots),
        "",
        "One decode of each mode pass by pass: [speed_trace.html](speed_trace.html).",
        "",
        "## How it was measured",
        "",
        "```",
        result["command"],
        "```",
        "",
        f"Seed {result['seed']}. Options of the run that are not the defaults: {_listed(result['options'])}.",
        "",
        f"Machine: {result['hardware']}",
        "",
        f"Versions: {versions}",
    ]


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {value}`" for key, value in options.items()) or "none"


def _plots(tables: Mapping[str, Any], quality: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw what there is; names of the files without their ending."""
    drawn = []
    points = points_of(tables["modes"], quality, "recall@1")
    if points:
        plot_frontier(points, "recall@1 over hits", folder / "speed_frontier.png")
        drawn.append("speed_frontier")
    for name, (_, setting) in HEADINGS.items():
        curves = curves_of(tables[name], setting) if name != "modes" else []
        # shorter blocks and drafts stay in the table: as curves they hide one another
        curves = [
            curve for curve in curves if "/" not in curve.name and not curve.name.startswith("speculative ")
        ]
        if curves:
            plot_speedups(curves, setting, folder / f"speed_{name}.png")
            drawn.append(f"speed_{name}")
    return drawn
