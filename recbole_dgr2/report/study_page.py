"""The Markdown page of a study: stages over several seeds, from the JSON of `python -m recbole_dgr2.study`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbole_dgr2.report.benchmark_page import markdown
from recbole_dgr2.report.evaluation import FAILURES
from recbole_dgr2.report.significance import Interval
from recbole_dgr2.report.study_figures import (
    AR,
    EVERYONE,
    FLOOR,
    NAIVE,
    PLAIN_SYSTEMS,
    SPECULATIVE,
    STUDENTS,
    TEACHERS,
    Averaged,
    Study,
    main_decoder,
)

SHORT = {"recall@1": "R@1", "recall@3": "R@3", "ndcg@3": "NDCG@3"}
PAPER = {
    FLOOR: (0.2811, 0.5591, 0.4401),
    "ar_teacher": (0.2960, 0.5651, 0.4497),
    NAIVE: (0.2811, 0.5591, 0.4401),
    "conversion": (0.2930, 0.5651, 0.4497),
    "distillation": (0.2944, 0.5658, 0.4497),
    "reinforcement": (0.2951, 0.5671, 0.4517),
}
"""R@1, R@3, NDCG@3 of Diffusion-GR2 (arXiv 2607.01170) on Amazon Beauty."""
PAPER_SPEED = {"block 0.9": (0.2950, 2.4), "block 0.6": (0.2942, 3.3), "block 0.4": (0.2936, 3.5)}
"""R@1, and the speed-up over autoregressive decoding on one H100."""
PROTOCOL = (
    "The paper's figures are of Qwen3-8B on 1,615 hits of one run, with candidates of another retriever and speeds of "
    "one H100; ours are of these runs' model on {hardware}, on {n_hits} hits of {retriever} ({dataset}), averaged over "
    "seeds: the steps from row to row compare, the levels do not."
)
EXPLAINED = (
    "Hits are users whose target is among the {n_candidates} candidates: {n_hits} of {n_users}. A mean over seeds "
    "stands with the smallest and largest seed in brackets; 95 %: bootstrap over users of the mean over seeds. lift: "
    "share of the teacher's gain over the retriever in R@1. all: over all users, as RecBole counts. valid: raw "
    "answers of {sample} random users that are a permutation of the candidates; copied: share of the valid ones that "
    "only repeat the input order. tok/pass: tokens a forward pass, every pass after prefill counted. speed-up: at "
    "batch 1, over autoregressive decoding of the same weights, measured in turn on {timed} requests (0: not "
    "measured). training s: of this stage alone. Students answer in blocks at tau 0.9, the teacher autoregressively."
)
_MISSING = "-"


def study_page(content: Mapping[str, Any], plot: str | None = None) -> str:
    """The page as Markdown text; `plot`: name of the file that `study_plot.write_plot` left beside it."""
    study = Study(content)
    parts = [
        ("Accuracy", EXPLAINED.format(**content), _accuracy(study)),
        ("Paired differences", _paired_text(), _paired(study)),
        ("Threshold", _threshold_text(), _thresholds(study)),
        ("Speculative decoding", _speculative_text(), _speculative(study)),
        ("Beside the paper", PROTOCOL.format(**content), _beside(study)),
    ]
    lines = [f"# Stages on {content['dataset']}, {len(content['runs'])} seed(s)", ""]
    for heading, text, cells in parts:
        if len(cells) > 1:
            lines += [f"## {heading}", "", text, "", *markdown(cells), ""]
        if heading == "Accuracy":
            lines += _notes(study)
        if heading == "Threshold" and plot:
            lines += [f"![valid answers against tokens a pass]({plot})", ""]
    if any(name in STUDENTS for name in study.names):
        lines += [*markdown(_beside_speed(study)), ""]
    return "\n".join([*lines, *_tail(content)]) + "\n"


def _accuracy(study: Study) -> list[list[str]]:
    metrics = study.metrics
    shown = [name for metric in metrics for name in (SHORT[metric], "95 %")]
    more = ["valid", "copied", "tok/pass", "speed-up", "training s"]
    cells = [["system", "seeds", "decoder", *shown, "lift", *(f"all {name}" for name in EVERYONE), *more]]
    for name in study.names:
        row = study.row(name)
        if row is None:
            continue
        decoder = main_decoder(study.content["entries"], name)
        figures = [cell for metric in metrics for cell in _mean_cells(study, row, metric)]
        valid = row.valid()
        cells.append(
            [
                name,
                str(len(row.entries)),
                _MISSING if name in PLAIN_SYSTEMS else decoder,
                *figures,
                _number(study.lift_share(row)),
                *(_number(row.everyone(metric)) for metric in EVERYONE),
                _MISSING if valid is None else f"{valid[0]:.4f}",
                _number(row.mean("copied")),
                _number(row.mean("tokens_per_pass")),
                _times(row.speedup()),
                _number(row.mean("seconds"), 0),
            ]
        )
    return cells


def _mean_cells(study: Study, row: Averaged, metric: str) -> list[str]:
    seeds, interval = row.by_seed(metric), row.interval(metric, study.content["sample_seed"])
    if not seeds or interval is None:
        return [_MISSING, _MISSING]
    mean = sum(seeds) / len(seeds)
    return [f"{mean:.4f} ({min(seeds):.4f} to {max(seeds):.4f})", _span(interval)]


def _notes(study: Study) -> list[str]:
    """What a reader must know of rows that are not of all seeds or all hits."""
    lines = []
    for name in study.names:
        row = study.row(name)
        if row is None:
            continue
        if len(row.entries) < len(study.content["runs"]):
            lines.append(f"- {name}: {len(row.entries)} of {len(study.content['runs'])} seeds.")
        lines += [f"- {name}, seed {e['seed']}: {e['traces']}" for e in row.entries if e.get("traces")]
        lines += [
            f"- {name}, seed {entry['seed']}: the same weights as {same}."
            for entry in row.entries
            for same in _same_weights(study, entry)
        ]
        if len(row.rows) < row.hits:
            lines.append(
                f"- {name}: decoded for the random users alone, {len(row.rows)} of them hits; its lift and "
                "differences are on these."
            )
    return [*lines, ""] if lines else []


def _same_weights(study: Study, entry: Mapping[str, Any]) -> list[str]:
    """The row before an entry's own, if any, that has its very weights: a stage may keep those it began with."""
    before = study.names[: study.names.index(entry["name"])]
    found = {
        other["name"]
        for other in study.content["entries"]
        if entry["weights"] and (other["weights"], other["seed"]) == (entry["weights"], entry["seed"])
    }
    return [name for name in before if name in found][:1]


def _paired_text() -> str:
    return (
        "What the first has over the second: each user's metric averaged over the seeds that both have, then a paired "
        "bootstrap over users."
    )


def _paired(study: Study) -> list[list[str]]:
    shown = [name for metric in study.metrics for name in (SHORT[metric], "95 %", "p")]
    cells = [["system", "against", "seeds", "hits", *shown]]
    for a, b in study.pairs():
        tests = [study.test(a, b, metric) for metric in study.metrics]
        figures, counts = [], ["0", "0"]
        for found in tests:
            if found is None:
                continue
            test, users, seeds = found
            counts = [str(seeds), str(users)]
            figures += [f"{test.difference:+.4f}", _span(test.ci95, "+.4f"), f"{test.p_bootstrap:.4f}"]
        if figures:
            cells.append([a, b, *counts, *figures])
    return cells


def _threshold_text() -> str:
    return (
        "Every student in each way of decoding. valid: pooled over seeds, with its Wilson 95 % interval, then the "
        "number of answers with each kind of failure. The speculative output is the autoregressive one where `= AR` "
        "is 1, and so is its accuracy on all hits; only the random users' answers were decoded."
    )


def _thresholds(study: Study) -> list[list[str]]:
    metrics = study.metrics
    head = ["system", "decoder", *(SHORT[metric] for metric in metrics), "valid", "95 %", *FAILURES]
    cells = [[*head, "= AR", "tok/pass", "speed-up"]]
    for name in [name for name in study.names if name in STUDENTS]:
        for decoder in study.decoders(name):
            row = study.row(name, decoder)
            accuracy = study.row(name, AR) if decoder == SPECULATIVE else row
            assert row is not None  # of a decoder there is
            means = [accuracy.by_seed(metric) if accuracy else [] for metric in metrics]
            valid = row.valid()
            cells.append(
                [
                    name,
                    decoder,
                    *(_number(sum(one) / len(one)) if one else _MISSING for one in means),
                    *([f"{valid[0]:.4f}", _span(valid[1])] if valid else [_MISSING] * 2),
                    *(str(valid[2][kind]) if valid else _MISSING for kind in FAILURES),
                    _number(row.mean("equal_to_ar")),
                    _number(row.mean("tokens_per_pass")),
                    _times(row.speedup()),
                ]
            )
    return cells


def _speculative_text() -> str:
    return "acceptance: share of the verified draft tokens that stood. Means over seeds."


def _speculative(study: Study) -> list[list[str]]:
    cells = [["system", "seeds", "tok/pass", "acceptance", "= AR", "speed-up"]]
    for name in study.names:
        row = study.row(name, SPECULATIVE)
        if row is not None:
            figures = [_number(row.mean(key)) for key in ("tokens_per_pass", "acceptance", "equal_to_ar")]
            cells.append([name, str(len(row.entries)), *figures, _times(row.speedup())])
    return cells


def _beside(study: Study) -> list[list[str]]:
    metrics = study.metrics
    cells = [["system", *(f"{who} {SHORT[metric]}" for metric in metrics for who in ("paper", "ours"))]]
    for name, figures in PAPER.items():
        own_name = (study.teacher or name) if name == TEACHERS[0] else name
        row = study.row(own_name)
        paper = dict(zip(SHORT, figures, strict=True))
        ours = {metric: row.by_seed(metric) if row else [] for metric in metrics}
        pairs = [
            (f"{paper[metric]:.4f}", _number(sum(own) / len(own) if own else None))
            for metric, own in ours.items()
        ]
        shown = name if own_name == name else f"{name} (ours: {own_name})"
        cells.append([shown, *(cell for pair in pairs for cell in pair)])
    return cells


def _beside_speed(study: Study) -> list[list[str]]:
    """Thresholds of the last student there is, beside the paper's."""
    students = [name for name in study.names if name in STUDENTS]
    last = students[-1] if students else STUDENTS[-1]
    cells = [["decoder", "paper R@1", "ours R@1", "paper speed-up", f"ours speed-up ({last})"]]
    for decoder, (recall, speedup) in PAPER_SPEED.items():
        row = study.row(last, decoder)
        own = row.by_seed("recall@1") if row else []
        mean = _number(sum(own) / len(own) if own else None)
        cells.append(
            [decoder, f"{recall:.4f}", mean, f"{speedup:.1f}x", _times(row.speedup() if row else None)]
        )
    return cells


def _tail(content: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {value}" for name, value in content["versions"].items())
    return [
        "## How it was measured",
        "",
        "```",
        content["command"],
        "```",
        "",
        f"Seeds {', '.join(map(str, content['seeds']))}; sample of users and intervals: seed {content['sample_seed']}; "
        f"accuracy and validity at batch {content['batch']}.",
        "",
        f"Options of the runs that are not the defaults (a list: run by run): {_options(content['options'])}.",
        "",
        *_variant_options(content["variant_options"]),
        f"Machine: {content['hardware']}",
        "",
        f"Versions: {versions}",
    ]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {value}`" for key, value in options.items()) or "none"


def _variant_options(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What to change in the runs' options to get a variant."""
    if not options:
        return []
    lines = [f"- {name}: {_options(own)}." for name, own in options.items()]
    return ["Options in which a variant differs:", "", *lines, ""]


def _span(ends: Interval, form: str = ".4f") -> str:
    return " to ".join(format(end, form) for end in ends)


def _number(value: float | None, places: int = 4) -> str:
    return _MISSING if value is None else f"{value:.{places}f}"


def _times(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.4f}x"
