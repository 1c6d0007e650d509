"""The Markdown page of a benchmark, from the JSON that `python -m recbole_dgr2.benchmark` collects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recbole_dgr2.data.parts import SPLITS
from recbole_dgr2.report.comparison import comparison_cells
from recbole_dgr2.report.floors import LEAKY_NOTE, floor_cells

METRICS = ("recall@1", "recall@3", "recall@5", "recall@10", "ndcg@3", "ndcg@5", "ndcg@10", "mrr@10")
PROTOCOL = (
    "Leave-one-out in time order (the last item of a user is the test target, the one before validates), ranking over "
    "the whole catalogue, no sampling; items of the history are excluded; metrics by RecBole's own Evaluator, over all "
    "users. The retriever with the best validation NDCG@10 is kept."
)
PUBLISHED = (
    (
        "OneRec-Think (2510.11639)",
        "OneRec-Think",
        "R@5 .0563, R@10 .0791",
        "generative, other candidate space",
    ),
    ("RecBole #1290", "SASRec", "R@10 .083, NDCG@10 .0416", "history not excluded, length 50"),
    ("LETTER #20", "SASRec", "R@5 .0543, R@10 .0821, NDCG@10 .0405", "LETTER's copy of the data"),
    (
        "pswrec2k26",
        "SASRec",
        "R@10 .0736 and .0848, NDCG@10 .0391 and .0432",
        "two runs, batch 128, length 50",
    ),
    ("S3-Rec line", "GRU4Rec", "R@10 .0283, NDCG@10 .0137", "binary cross-entropy, not RecBole"),
    (
        "Diffusion-GR2",
        "floor of its candidates",
        "R@1 .2811, R@3 .5591, NDCG@3 .4401",
        "over 1,615 hits of 22,363",
    ),
)


def benchmark_page(content: Mapping[str, Any], studies: Sequence[str] = ()) -> str:
    """The page as Markdown text; `studies`: files of the pages beside it that compare stages of language models."""
    lines = [f"# {content['dataset']}", "", PROTOCOL, ""]
    retrievers = content.get("retrievers", {})
    if retrievers:
        lines += ["## Retrievers", "", *markdown(_metric_cells(retrievers)), ""]
        lines += ["Seconds are those of training on the machine below, other work running beside it.", ""]
        lines += [
            "## Hit share and floor",
            "",
            "Over hits, users whose target is among the best N; 95 % intervals.",
            "",
        ]
        lines += [*markdown(_width_cells(retrievers)), ""]
    for name, splits in content.get("splits", {}).items():
        lines += _split_part(name, splits)
    if studies:
        links = [f"[{name}]({name})" for name in studies]
        lines += ["## Language models over several seeds", "", *(f"- {link}" for link in links), ""]
    lines += [
        "## Published figures",
        "",
        *markdown([["source", "model", "figures", "protocol"], *map(list, PUBLISHED)]),
    ]
    lines += ["", "## How it was measured", "", "```", *_commands(content), "```", ""]
    if retrievers:
        lines += ["Hyper-parameters (properties/benchmark/):", ""]
        lines += [
            f"- {name}: {entry['options'] or 'none'}, seed {entry['seed']}"
            for name, entry in retrievers.items()
        ]
        lines.append("")
    versions = ", ".join(f"{name} {value}" for name, value in content.get("versions", {}).items())
    return "\n".join([*lines, f"Machine: {content.get('hardware', '-')}", "", f"Versions: {versions}"]) + "\n"


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    """Cells as lines of a Markdown table, the header first."""
    first, *rest = (f"| {' | '.join(row)} |" for row in cells)
    return [first, "|" + " --- |" * len(cells[0]), *rest]


def _metric_cells(retrievers: Mapping[str, Any]) -> list[list[str]]:
    cells = [["retriever", *METRICS, "best epoch", "seconds"]]
    for name, entry in retrievers.items():
        tail = [str(entry["best_epoch"]), f"{entry['train_seconds']:.0f}"]
        cells.append([name, *_numbers(entry["metrics"]), *tail])
        if entry.get("unmasked"):
            cells.append([f"{name}, history not excluded", *_numbers(entry["unmasked"]), "", ""])
    return cells


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    return [f"{metrics[name]:.4f}" if name in metrics else "-" for name in METRICS]


def _width_cells(retrievers: Mapping[str, Any]) -> list[list[str]]:
    cells: list[list[str]] = []
    for name, entry in retrievers.items():
        for n, floor in entry["widths"].items():
            head, row = floor_cells([floor])
            if not cells:
                cells.append(["retriever", "N", *head[3:]])
            cells.append([name, n, *row[3:]])
    return cells


def _split_part(name: str, splits: Mapping[str, Any]) -> list[str]:
    floors = [floor for report in splits.values() for floor in report["floors"]]
    lines = [f"## Training, validation and test candidates of {name}", "", *markdown(floor_cells(floors)), ""]
    if "leaky" in splits:
        lines += [LEAKY_NOTE, ""]
    lines += [f"## Second stages on the candidates of {name}", "", "Over hits.", ""]
    names = ("recall@1", "recall@3", "ndcg@3")
    cells = [["split", "system", *names]]
    for split, report in splits.items():
        for row in report["rows"]:
            cells.append([split, row["name"], *(_with_interval(row, metric) for metric in names)])
    lines += [*markdown(cells), ""]
    for split, report in splits.items():
        if report["comparisons"]:
            lines += [
                f"Paired bootstrap under {split}:",
                "",
                *markdown(comparison_cells(report["comparisons"])),
                "",
            ]
    return lines


def _with_interval(row: Mapping[str, Any], metric: str) -> str:
    if metric not in row["hits"]:
        return "-"
    low, high = row["ci95"][metric]
    return f"{row['hits'][metric]:.4f} ({low:.3f}-{high:.3f})"


def _commands(content: Mapping[str, Any]) -> list[str]:
    start = f"python -m recbole_dgr2.benchmark --dataset={content['dataset']} --output=results/beauty.json"
    parts = [f"{start} --retrievers={','.join(content['retrievers'])}"] if content.get("retrievers") else []
    if content.get("splits"):
        named = (_named_splits(name, tuple(found)) for name, found in content["splits"].items())
        parts.append(f"{start} --splits={','.join(named)}")
    return parts or [start]


def _named_splits(retriever: str, splits: tuple[str, ...]) -> str:
    return retriever if splits == SPLITS else f"{retriever}:{'+'.join(splits)}"
