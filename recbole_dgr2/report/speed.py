"""What a speed benchmark says: one entry a decoder and setting, with the quality of the same outputs, as tables.

An entry is a dictionary of plain values: the setting (`decoder`, `batch`, `input`, `output`), the speed (see
`speed_entry`) and the quality (see `quality_entry`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recbole_dgr2.report.evaluation import (
    RankingLike,
    count_validity,
    hit_view,
    per_user_metrics,
    rank_after,
    repetition,
)
from recbole_dgr2.report.plots import Curve, Point
from recbole_dgr2.report.significance import paired_test
from recbole_dgr2.report.throughput import Throughput

QUALITY = ("recall@1", "recall@3", "ndcg@3")
SAMPLES = 2000  # resamples of an interval
TAU = 0.9  # threshold of "auto any" on the page
_MISSING = "-"


def speed_entry(speed: Throughput[Any]) -> dict[str, Any]:
    """The figures of one decoder: seconds are medians over rounds, a range is its smallest and largest value."""
    return {
        "tokens": speed.tokens,
        "passes": speed.passes,
        "tokens_per_pass": speed.tokens_per_forward,
        "tokens_per_second": speed.tokens_per_second,
        "rates": list(speed.rates),
        "seconds": speed.seconds,
        "seconds_range": list(speed.seconds_range),
        "prefill_seconds": speed.prefill_seconds,
        "speedup": speed.speedup,
        "speedup_range": list(speed.speedup_range),
    }


def quality_entry(
    outputs: Sequence[tuple[int, ...]],
    wanted: Sequence[tuple[int, ...]],
    rankings: tuple[Sequence[RankingLike], Sequence[RankingLike]],
    targets: Sequence[int | None],
    seed: int,
) -> dict[str, Any]:
    """Quality of the outputs that were timed.

    Args:
        outputs, wanted: token ids of this decoder and of autoregressive decoding.
        rankings: parsed outputs of both.
        targets: slot of each target in the retriever's order, None where it is no candidate.
        seed: of the intervals.

    Returns:
        Share of outputs equal to autoregressive ones, repetition, validity; over hits, where there are any, the means,
        their 95 % intervals, and the paired difference to autoregressive decoding with its interval and p-value.
    """
    equal = np.mean([own == other for own, other in zip(outputs, wanted, strict=True)])
    validity = count_validity(rankings[0])
    hits = [row for row, slot in enumerate(targets) if slot is not None]
    entry: dict[str, Any] = {
        "equal_to_ar": float(equal),
        "repetition": repetition(outputs),
        "valid_rate": validity.rate,
        "valid_ci95": list(validity.interval),
        "failures": dict(validity.failures),
        "hits": len(hits),
    }
    if not hits:
        return entry
    slots = [slot for slot in targets if slot is not None]
    n = max(len(rankings[0][row].order) for row in hits)
    own, base = (rank_after(slots, [one[row].order for row in hits]) for one in rankings)
    means, ends = hit_view(own, n, SAMPLES, seed)
    entry["metrics"] = {name: means[name] for name in QUALITY if name in means}
    entry["ci95"] = {name: list(ends[name]) for name in entry["metrics"]}
    values = [per_user_metrics(ranks, n) for ranks in (own, base)]
    tests = {name: paired_test(values[0][name], values[1][name], SAMPLES, seed) for name in entry["metrics"]}
    entry["difference"] = {
        name: {"mean": test.difference, "ci95": list(test.ci95), "p": test.p_bootstrap}
        for name, test in tests.items()
    }
    return entry


def speed_cells(entries: Sequence[Mapping[str, Any]], setting: str) -> list[list[str]]:
    """Table of entries, the header first; `setting` is the key that changes from row to row besides the decoder."""
    head = ["tok/s", "speed-up", "range", "tok/pass", "ms/pass", "prefill s"]
    cells = [[setting, "decoder", *head, "= AR", "valid", "repeated", *QUALITY]]
    for entry in entries:
        low, high = entry["speedup_range"]
        metrics = entry.get("metrics", {})
        cells.append(
            [
                str(entry[setting]),
                entry["decoder"],
                f"{entry['tokens_per_second']:.0f}",
                f"{entry['speedup']:.2f}x",
                f"{low:.2f}-{high:.2f}",
                f"{entry['tokens_per_pass']:.2f}",
                f"{1e3 * entry['seconds'] / entry['passes']:.2f}",
                f"{entry['prefill_seconds']:.2f}",
                *(_number(entry.get(key)) for key in ("equal_to_ar", "valid_rate", "repetition")),
                *(_number(metrics.get(name)) for name in QUALITY),
            ]
        )
    return cells


def quality_cells(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Table of untimed quality: equality and validity over users, accuracy over hits with paired differences."""
    cells = [
        ["decoder", "users", "tok/pass", "= AR", "valid", "95%", "hits", *QUALITY, "recall@1 less AR", "p"]
    ]
    for entry in entries:
        metrics, difference = entry.get("metrics", {}), entry.get("difference", {}).get("recall@1")
        cells.append(
            [
                entry["decoder"],
                str(entry["users"]),
                f"{entry['tokens_per_pass']:.2f}",
                *(_number(entry[key]) for key in ("equal_to_ar", "valid_rate")),
                _span(entry["valid_ci95"]),
                str(entry["hits"]),
                *(_number(metrics.get(name)) for name in QUALITY),
                _MISSING
                if difference is None
                else f"{difference['mean']:+.4f} ({_span(difference['ci95'])})",
                _MISSING if difference is None else f"{difference['p']:.3f}",
            ]
        )
    return cells


def losses(entries: Sequence[Mapping[str, Any]], setting: str) -> list[str]:
    """One line for each setting in which a decoder is slower than autoregressive decoding: where it does not pay."""
    return [
        f"- {entry['decoder']} at {setting} {entry[setting]}: {entry['speedup']:.2f}x"
        for entry in entries
        if entry["speedup"] < 1.0 and entry["decoder"] != "generate"
    ]


def auto_cells(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Table of "auto" and "auto any" beside the best of the fixed decoders each may take, one row a batch size.

    Percentages against the best are medians, and the ends, of ratios within a round: of auto itself, and of the decoder
    that it took where that was timed as a fixed one, which leaves only the choice to differ. "auto any" runs at the
    threshold `TAU`; where it was not timed, or nothing else was, there is no row.
    """
    cells = [["batch", "may take", "best fixed", "took", "choice", "against best", "range", "first call"]]
    for batch in dict.fromkeys(entry["batch"] for entry in entries):
        here = {entry["decoder"]: entry for entry in entries if entry["batch"] == batch}
        exact = [name for name in here if name.split()[0] in ("autoregressive", "speculative")]
        inexact = [name for name in here if name.split("/")[0] == f"block {TAU:g}"]
        for auto, names, may in (("auto", exact, "exact"), ("auto any", [*exact, *inexact], "any")):
            if auto in here and names:
                own, best = here[auto], max(names, key=lambda name: here[name]["tokens_per_second"])
                took = own["reason"].replace(":", ";").split(";")[0]
                ratios = _gains(own, here[best])
                ends = f"{min(ratios):+.0%} to {max(ratios):+.0%}"
                start = own["first_call"] / own["tokens_per_second"] - 1
                choice = _choice(here, took, best)
                share = f"{statistics.median(ratios):+.1%}"
                cells.append([str(batch), may, best, took, choice, share, ends, f"{start:+.0%}"])
    return cells


def _gains(entry: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """What one decoder has over another in each round, as a share."""
    return [a / b - 1 for a, b in zip(entry["rates"], other["rates"], strict=True)]


def _choice(here: Mapping[str, Mapping[str, Any]], took: str, best: str) -> str:
    """The decoder that auto took, timed as a fixed one, against the best; a name without a length has the longest."""
    blocks = [entry["queries"] for name, entry in here.items() if name.startswith("block")]
    lengths = [int(queries) for counts in blocks for queries in counts]
    suffixes = (f" {max(lengths)}", f"/{max(lengths)}") if lengths else ()

    def plain(name: str) -> str:
        return next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name)

    if plain(took) == plain(best):
        return "the best"
    fixed = here.get(took) or here.get(plain(took))
    return _MISSING if fixed is None else f"{statistics.median(_gains(fixed, here[best])):+.1%}"


def cost_cells(costs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Table of pass costs: milliseconds of a pass over q tokens a row, and the ratio to one token."""
    queries = costs[0]["queries"] if costs else [1]
    cells = [["batch", *(f"c({q}) ms" for q in queries), *(f"c({q})/c(1)" for q in queries[1:])]]
    for cost in costs:
        times = cost["seconds"]
        shown = [f"{1e3 * seconds:.2f}" for seconds in times]
        cells.append([str(cost["batch"]), *shown, *(f"{seconds / times[0]:.2f}" for seconds in times[1:])])
    return cells


def implied_cells(inputs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Table of the speed-ups that the same passes would give after prompts of other lengths."""
    names = list(inputs[0]["speedup"]) if inputs else []
    rows = [[str(one["input"]), *(f"{one['speedup'][name]:.2f}x" for name in names)] for one in inputs]
    return [["input tokens", *names], *rows]


def points_of(
    entries: Sequence[Mapping[str, Any]], quality: Sequence[Mapping[str, Any]], metric: str
) -> list[Point]:
    """Points of the plot of accuracy against throughput: the speed of timed entries, the accuracy of many hits.

    Decoders whose quality was not measured apart, or that has no such metric, are left out.
    """
    speeds = {entry["decoder"]: entry["tokens_per_second"] for entry in entries}
    return [
        Point(
            entry["decoder"],
            speeds[entry["decoder"]],
            entry["metrics"][metric],
            (entry["ci95"][metric][0], entry["ci95"][metric][1]),
        )
        for entry in quality
        if entry["decoder"] in speeds and metric in entry.get("metrics", {})
    ]


def curves_of(entries: Sequence[Mapping[str, Any]], setting: str) -> list[Curve]:
    """Curves of speed-up against `setting`, one a decoder, the baseline left out."""
    names = list(dict.fromkeys(entry["decoder"] for entry in entries))
    curves = []
    for name in names[1:]:
        own = sorted((e for e in entries if e["decoder"] == name), key=lambda entry: entry[setting])
        ends = [entry["speedup_range"] for entry in own]
        curves.append(
            Curve(
                name,
                [entry[setting] for entry in own],
                [entry["speedup"] for entry in own],
                [low for low, _ in ends],
                [high for _, high in ends],
            )
        )
    return curves


def _span(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}"


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3f}"
