"""The plots of a benchmark (accuracy against throughput, speed-up against length or batch), a study and a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
_MARKERS = "osD^vP*"


@dataclass(frozen=True)
class Point:
    """One decoder on one set of requests: its name, tokens a second, accuracy, and the interval of the accuracy."""

    name: str
    tokens_per_second: float
    accuracy: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curve:
    """Speed-up of one decoder over autoregressive decoding at each x; low and high: the spread over rounds."""

    name: str
    x: Sequence[float]
    speedup: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class ValidityLine:
    """One student at falling thresholds (`taus`, as text): tokens a pass, valid share and its interval at each."""

    name: str
    taus: Sequence[str]
    tokens: Sequence[float]
    valid: Sequence[float]
    intervals: Sequence[tuple[float, float]]


def plot_frontier(points: Sequence[Point], metric: str, path: Path) -> None:
    """Accuracy against tokens a second, one marker a decoder (after Diffusion-GR2, arXiv 2607.01170, Table 3)."""

    def draw(axes: Axes) -> None:
        for index, point in enumerate(points):
            spread = None
            if point.interval is not None:
                low, high = point.interval
                spread = [[point.accuracy - low], [high - point.accuracy]]
            axes.errorbar(
                [point.tokens_per_second], [point.accuracy], yerr=spread, label=point.name, **_style(index)
            )
        axes.set_xlabel("tokens per second")
        axes.set_ylabel(metric)
        axes.set_xlim(left=0)

    _save(draw, path)


def plot_speedups(curves: Sequence[Curve], axis: str, path: Path) -> None:
    """Speed-up over autoregressive decoding against a length or a batch size (after Figure 6 of the same)."""

    def draw(axes: Axes) -> None:
        ticks = sorted({x for curve in curves for x in curve.x})
        for index, curve in enumerate(curves):
            style = _style(index)
            axes.plot(curve.x, curve.speedup, label=curve.name, linestyle="-", **style)
            axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
        axes.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(axis)
        axes.set_ylabel("speed-up over autoregressive")
        axes.set_ylim(bottom=0)

    _save(draw, path)


def plot_validity(lines: Sequence[ValidityLine], path: Path) -> None:
    """Valid share of raw answers against tokens a pass, one marker a threshold: further right at a height is faster
    at equal validity."""

    def draw(axes: Axes) -> None:
        for index, line in enumerate(lines):
            ends = zip(line.valid, line.intervals, strict=True)
            spread = list(zip(*((mid - low, high - mid) for mid, (low, high) in ends), strict=True))
            axes.errorbar(
                line.tokens,
                line.valid,
                yerr=spread,
                label=line.name,
                linestyle="-",
                capsize=3,
                **_style(index),
            )
            for tau, x, y in zip(line.taus, line.tokens, line.valid, strict=True):
                axes.annotate(tau, (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
        axes.set_xlabel("tokens a pass (at each marker: tau)")
        axes.set_ylabel("valid share of raw answers, 95 %")

    _save(draw, path)


def plot_calibration(found: Mapping[str, Any], path: Path) -> None:
    """Share of commits that the teacher agrees with against their confidence, a curve a stage of a diagnosis."""

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle="--")
        for index, (name, figures) in enumerate(found.items()):
            bins = [entry for entry in figures["calibration"]["bins"] if entry["slots"]]
            x, y = ([entry[key] for entry in bins] for key in ("confidence", "agreement"))
            axes.plot(x, y, label=name, linestyle="-", **_style(index))
        axes.set_xlabel("confidence")
        axes.set_ylabel("share that is the teacher's own choice")

    _save(draw, path)


def plot_divergence(found: Mapping[str, Any], path: Path) -> None:
    """Divergence from the teacher against the masked share of the block, a curve a stage of a diagnosis."""

    def draw(axes: Axes) -> None:
        for index, (name, figures) in enumerate(found.items()):
            bins = [entry for entry in figures["kl_by_masked_share"] if entry["slots"]]
            x = [(entry["low"] + entry["high"]) / 2 for entry in bins]
            axes.plot(x, [entry["kl"] for entry in bins], label=name, linestyle="-", **_style(index))
        axes.set_xlabel("masked share of the block")
        axes.set_ylabel("KL(teacher || student), nats a slot")
        axes.set_ylim(bottom=0)

    _save(draw, path)


def _style(index: int) -> dict[str, Any]:
    turn, place = divmod(index, len(_COLOURS))  # colours that come again have another marker
    return {"color": _COLOURS[place], "marker": _MARKERS[(place + turn) % len(_MARKERS)]}


def _save(draw: Callable[[Axes], None], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
