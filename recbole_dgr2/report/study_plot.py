"""The plot of a study: how many of the answers stay valid at how many tokens a pass, a line a student."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recbole_dgr2.report.plots import ValidityLine, plot_validity
from recbole_dgr2.report.study_figures import STUDENTS, Study


def validity_lines(content: Mapping[str, Any]) -> list[ValidityLine]:
    """Of every student that was decoded at several thresholds: tokens a pass, valid share and interval at each, the
    thresholds falling; tau 1 aside, at which every student commits one token a pass."""
    study = Study(content)
    lines = []
    for name in (name for name in study.names if name in STUDENTS):
        found = []
        for decoder in study.decoders(name):
            row = study.row(name, decoder)
            assert row is not None  # of a decoder there is
            valid, tokens = row.valid(), row.mean("tokens_per_pass")
            if decoder.startswith("block ") and decoder != "block 1" and valid and tokens is not None:
                found.append((decoder.removeprefix("block "), tokens, valid[0], valid[1]))
        if len(found) > 1:
            lines.append(ValidityLine(name, *zip(*found, strict=True)))
    return lines


def write_plot(content: Mapping[str, Any], path: Path) -> Path | None:
    """Draw it into `path`, a PNG; None, and no file, where no student was decoded at several thresholds."""
    lines = validity_lines(content)
    if not lines:
        return None
    plot_validity(lines, path)
    return path
