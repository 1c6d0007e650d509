"""Ranked lists for other programs: CSV and JSON lines in external ids, with a status for every user."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

Status = Literal["ok", "repaired", "fallback", "missing"]
COLUMNS = ("user_id", "rank", "item_id", "score", "status", "reason")
FORMATS = (".csv", ".jsonl")


@dataclass(frozen=True)
class RankedList:
    """One user's list in external ids, best first.

    status: "ok" the list is what the system answered; "repaired" the raw answer was no permutation of the candidates
    and was mended; "fallback" no answer could be read, so the order is the retriever's; "missing" there is no list.
    reason: why it is not "ok", else empty. scores: strictly falling, so that whoever sorts by them gets this order
    (see `falling_scores`), or empty.

    Raises:
        ValueError: scores that do not fall, or not one an item.
    """

    user_id: str
    items: tuple[str, ...]
    scores: tuple[float, ...]
    status: Status
    reason: str = ""

    def __post_init__(self) -> None:
        rising = any(before <= after for before, after in pairwise(self.scores))
        if rising or len(self.scores) not in (0, len(self.items)):
            raise ValueError(f"user {self.user_id}: expected falling scores, one an item, got {self.scores}")


def falling_scores(values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """The scores that a retriever gave the items of a list, for the places of a new order: the best score first.

    Equal ones are raised by as few representable steps as make them fall strictly, in float32, as which a candidate
    file is read; the same as `permute_head` does to score rows.
    """
    scores = np.sort(np.asarray(values, dtype=np.float32))[::-1].copy()
    for place in range(len(scores) - 2, -1, -1):
        scores[place] = max(scores[place], np.nextafter(scores[place + 1], np.float32(np.inf)))
    return tuple(scores.tolist())


def write_lists(lists: Iterable[RankedList], path: Path) -> None:
    """Write lists to a .csv file (one line an item, a user without a list has one line) or a .jsonl file.

    Both can be read back as a `candidate_file`, in the same order whatever system ranked. The file
    appears whole or not at all.

    Raises:
        ValueError: another ending.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: unknown ending, expected {' or '.join(FORMATS)}")
    text = _csv_text(lists) if path.suffix.lower() == ".csv" else json_lines(lists)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def json_lines(lists: Iterable[RankedList]) -> str:
    """Lists as text, one JSON object a line."""
    return "".join(json.dumps(vars(entry), ensure_ascii=False, allow_nan=False) + "\n" for entry in lists)


def _csv_text(lists: Iterable[RankedList]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry in lists:
        tail = (entry.status, entry.reason)
        if not entry.items:
            writer.writerow((entry.user_id, "", "", "", *tail))
        for rank, item in enumerate(entry.items, 1):
            score = repr(entry.scores[rank - 1]) if entry.scores else ""
            writer.writerow((entry.user_id, rank, item, score, *tail))
    return stream.getvalue()
