"""Ranks of the targets of a run's test hits, system by system, kept in `ranks.json` of its folder.

A run may train its stages in several goes, each with a report of its own: what an earlier go found is still compared
with, as long as the lists are the same, the stage has the same weights, and it would answer in the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.config import Config
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.stage_order import TEACHER, TEACHER_RL, ancestor_teacher, teacher_folder
from recbole_dgr2.report.assessment import Panel
from recbole_dgr2.report.comparison import PLAIN_SYSTEMS, Resampling, compare_all
from recbole_dgr2.report.tables import ROW_ORDER, Row
from recbole_dgr2.system.cache import write_text

RANKS_FILE = "ranks.json"
FORMAT = 2
STUDENTS = ("naive", "conversion", "distillation", "reinforcement")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedRanks:
    """The content of ranks.json. lists: see `lists_digest`; ranks: of the hits, in the order of the test lists, by
    system; made_by: of a language model, what decides its answers: digest of its weights, and how it decodes."""

    lists: str
    ranks: Mapping[str, tuple[int, ...]]
    made_by: Mapping[str, str]


def lists_digest(ids: np.ndarray, targets: np.ndarray) -> str:
    """24 hexadecimal digits that stand for test candidates int64 [R, N] and their targets int64 [R]."""
    digest = hashlib.sha256(f"{ids.shape}".encode())
    for array in (ids, targets):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()[:24]


def read_ranks(folder: Path) -> SavedRanks:
    """What `compare_rows` kept.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or one of another format; one line with the cure.
    """
    path = folder / RANKS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; run {folder} again with this version, which reuses its finished stages"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
        ranks = {name: tuple(map(int, text.split())) for name, text in content["ranks"].items()}
        return SavedRanks(content["lists"], ranks, content["made_by"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it and run {folder} again") from error


def write_ranks(folder: Path, saved: SavedRanks) -> None:
    """Keep ranks in the run's folder; those of a system are one text, which keeps the file short."""
    ranks = {name: " ".join(map(str, own)) for name, own in saved.ranks.items()}
    content = {"format": FORMAT, "lists": saved.lists, "made_by": dict(saved.made_by), "ranks": ranks}
    write_text(folder / RANKS_FILE, json.dumps(content, indent=1) + "\n")


def compare_rows(config: Config, rows: Sequence[Row], panel: Panel, folder: Path) -> list[dict[str, Any]]:
    """Paired comparisons of the rows of a report, and of what earlier goes of the run left; keeps all ranks.

    Every system is compared with the retriever, language models with the baselines, students with the autoregressive
    stage they grew out of.
    """
    digest = lists_digest(panel.candidates.ids, panel.targets)
    ranks = {row.name: row.ranks for row in rows}
    made_by = {name: found for name in ranks if (found := _made_by(config, name, folder)) is not None}
    earlier = _earlier(folder, digest)
    for name in earlier.ranks.keys() - ranks.keys():
        current = _made_by(config, name, folder)
        if current is not None and current == earlier.made_by.get(name):
            ranks[name], made_by[name] = earlier.ranks[name], current
    ordered = {name: ranks[name] for name in ROW_ORDER if name in ranks}
    write_ranks(folder, SavedRanks(digest, ordered, made_by))
    return compare_all(
        {name: np.array(own, dtype=np.int64) for name, own in ordered.items()},
        {name: _origin(config, name, folder) for name in (TEACHER_RL, *STUDENTS) if name in ordered},
        Resampling(panel.candidates.n, panel.bootstrap_samples, panel.seed),
    )


def _earlier(folder: Path, digest: str) -> SavedRanks:
    """What an earlier go left; nothing where it was of other lists."""
    nothing = SavedRanks(digest, {}, {})
    if not (folder / RANKS_FILE).is_file():
        return nothing
    try:
        saved = read_ranks(folder)
    except ValueError as error:
        logger.warning("%s; written anew", error)
        return nothing
    return saved if saved.lists == digest else nothing


def _made_by(config: Config, name: str, folder: Path) -> str | None:
    """Weights and decoding that a row is made with; None for a system without any, or whose stage is not there.

    The exact modes are one decoding: their answers are the same.
    """
    if name in PLAIN_SYSTEMS:
        return None
    from recbole_dgr2.model.adapters import weights_digest

    stage = teacher_folder(config, folder) if name == "naive" else folder / name
    blocks = name == "naive" or views.answer_mode(config, name in STUDENTS) == "block"
    decoding = f"block {config['tau']:g}/{config['block_size']}" if blocks else "autoregressive"
    return f"{weights_digest(stage)}, {decoding}" if stage.is_dir() else None


def _origin(config: Config, name: str, folder: Path) -> str:
    """Name of the autoregressive stage that a stage grew out of."""
    if name == TEACHER_RL:
        return TEACHER
    return teacher_folder(config, folder).name if name == "naive" else ancestor_teacher(folder / name).name
