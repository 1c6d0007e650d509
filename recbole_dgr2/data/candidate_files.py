"""Candidate lists from anywhere: CSV, TSV or JSON lines with external ids, as a retriever of their own.

Columns of a table (one line a candidate): `user_id`, `item_id`, and optionally `score` and `split`. JSON lines (one
line a list): `{"user_id": ..., "items": [...], "scores": [...], "split": ...}`. `split` is train, valid or test (the
default); a training list belongs to the user's last training interaction, and whoever wrote it vouches that its target
was unseen.
Without scores the order of the file counts; with them the higher score comes first, equal ones in the file's order.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.sequences import Phase, Rows, Sequences

PHASES: tuple[Phase, ...] = ("train", "valid", "test")
SEPARATORS = {".csv": ",", ".tsv": "\t", ".txt": "\t", ".inter": "\t"}
JSON_LINES = (".jsonl", ".ndjson")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileLists:
    """The lists of a candidate file by phase and internal user id: item ids and scores, best first.

    `dropped` counts what was left out and why.
    """

    path: Path
    lists: Mapping[Phase, Mapping[int, tuple[np.ndarray, np.ndarray]]]
    dropped: Mapping[str, int]

    def candidates(self, rows: Rows, sequences: Sequences, phase: Phase, options: FileOptions) -> Candidates:
        """Candidates of the rows of a phase; a row whose user has no list in the file has no candidates.

        Lists may be of any length: the best `options.width` are kept, shorter ones end in padding.
        """
        ids = np.zeros((len(rows), options.width), dtype=np.int64)
        scores = np.full(ids.shape, -np.inf, dtype=np.float32)
        lists = self.lists[phase]
        for row, (user, history) in enumerate(
            zip(rows.users.tolist(), rows.histories(sequences), strict=True)
        ):
            if user not in lists:
                continue
            items, values = lists[user]
            if options.mask_history:
                new = ~np.isin(items, history)
                items, values = items[new], values[new]
            count = min(len(items), options.width)
            ids[row, :count], scores[row, :count] = items[:count], values[:count]
        return Candidates(rows, ids, scores)


@dataclass(frozen=True)
class FileOptions:
    """How lists are cut: `width` slots a row; `mask_history` drops items of the row's history."""

    width: int
    mask_history: bool


@dataclass
class _Collected:
    """Lists while they are read: (phase, user) -> items and scores in file order."""

    items: dict[tuple[Phase, int], list[int]] = field(default_factory=dict)
    scores: dict[tuple[Phase, int], list[float]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    seen: set[tuple[Phase, int, int]] = field(default_factory=set)

    def drop(self, kind: str, count: int, example: str) -> None:
        """Count what is left out, and keep the first of its kind to name it."""
        self.dropped[kind] += count
        self.examples.setdefault(kind, example)

    def told(self) -> str:
        """Such as "1 of unknown items (first: file.csv:3: 'nope')"."""
        return ", ".join(
            f"{count} of {kind} (first: {self.examples[kind]})"
            for kind, count in sorted(self.dropped.items())
        )


def read_candidate_file(path: Path, user_ids: Mapping[str, int], item_ids: Mapping[str, int]) -> FileLists:
    """Read a candidate file.

    Args:
        path: its ending names the format: .csv, .tsv, .txt (tabs) or .jsonl.
        user_ids, item_ids: external to internal id, padding left out.

    Unknown users and items, and all but the first of an item that a list names twice, are left out and counted in a
    warning.

    Raises:
        FileNotFoundError, ValueError: no such file, an unknown format, a missing column, a score that is no number, or
            no known user or item at all; in one line with file and line number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"candidate_file: no such file {path}")
    collected, seen = _Collected(), 0
    for where, user, items, scores, phase in _entries(path):
        seen += 1
        if user not in user_ids:
            collected.drop("unknown users", 1, f"{where}: {user!r}")
            continue
        key = (_phase(where, phase), user_ids[user])
        _extend(collected, key, (where, items, scores), item_ids)
    if not collected.items:
        raise ValueError(
            f"{path}: none of its {seen} entries names a known user and item; expected the ids of the data set's .inter"
        )
    if collected.dropped:
        logger.warning("%s: left out %s", path, collected.told())
    return FileLists(path, _sorted_lists(collected), dict(collected.dropped))


def _extend(
    collected: _Collected,
    key: tuple[Phase, int],
    entry: tuple[str, Sequence[str], Sequence[Any] | None],
    item_ids: Mapping[str, int],
) -> None:
    where, items, scores = entry
    own, values = collected.items.setdefault(key, []), collected.scores.setdefault(key, [])
    for place, item in enumerate(items):
        if item not in item_ids:
            collected.drop("unknown items", 1, f"{where}: {item!r}")
            continue
        if (*key, item_ids[item]) in collected.seen:
            collected.drop("repeated items", 1, f"{where}: {item!r}")
        collected.seen.add((*key, item_ids[item]))
        own.append(item_ids[item])
        values.append(-float(len(own)) if scores is None else _score(where, scores[place]))
    if not own:
        del collected.items[key], collected.scores[key]


def _sorted_lists(collected: _Collected) -> dict[Phase, dict[int, tuple[np.ndarray, np.ndarray]]]:
    lists: dict[Phase, dict[int, tuple[np.ndarray, np.ndarray]]] = {phase: {} for phase in PHASES}
    for (phase, user), items in collected.items.items():
        ids, scores = np.array(items, dtype=np.int64), np.array(collected.scores[(phase, user)])
        order = np.argsort(-scores, kind="stable")
        _, first = np.unique(ids[order], return_index=True)
        kept = order[np.sort(first)]
        lists[phase][user] = (ids[kept], scores[kept].astype(np.float32))
    return lists


_Entry = tuple[str, str, list[str], "list[Any] | None", str]


def _entries(path: Path) -> Iterator[_Entry]:
    """(where, user, items, scores, split) of every line that holds a candidate or a list."""
    suffix = path.suffix.lower()
    if suffix in JSON_LINES:
        yield from _json_entries(path)
    elif suffix in SEPARATORS:
        yield from _table_entries(path, SEPARATORS[suffix])
    else:
        known = ", ".join([*SEPARATORS, *JSON_LINES])
        raise ValueError(f"candidate_file {path}: unknown ending {suffix!r}, expected one of {known}")


def _table_entries(path: Path, separator: str) -> Iterator[_Entry]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        # quotes are text in a table separated by tabs, as in atomic files
        reader = (
            csv.reader(stream, delimiter=separator)
            if separator == ","
            else csv.reader(stream, delimiter=separator, quoting=csv.QUOTE_NONE)
        )
        names = [name.partition(":")[0].strip() for name in next(reader, [])]
        for column in ("user_id", "item_id"):
            if column not in names:
                raise ValueError(
                    f"{path}: no column {column!r} in its first line; expected user_id, item_id and optionally score, "
                    f"split, got {', '.join(names) or 'an empty file'}"
                )
        place = {name: index for index, name in enumerate(names)}
        for number, cells in enumerate(reader, 2):
            if not any(cells):
                continue
            if len(cells) != len(names):
                raise ValueError(f"{path}:{number}: {len(cells)} columns, expected {len(names)}")
            if not cells[place["item_id"]]:
                continue  # a user without a list, as an export writes it
            scores = [cells[place["score"]]] if "score" in place and cells[place["score"]] else None
            split = cells[place["split"]] if "split" in place else "test"
            yield f"{path}:{number}", cells[place["user_id"]], [cells[place["item_id"]]], scores, split


def _json_entries(path: Path) -> Iterator[_Entry]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not a JSON object ({error})") from error
            if (
                not isinstance(entry, dict)
                or "user_id" not in entry
                or not isinstance(entry.get("items"), list)
            ):
                raise ValueError(f'{where}: expected {{"user_id": ..., "items": [...]}}')
            items, scores = [str(item) for item in entry["items"]], entry.get("scores") or None
            if scores is not None and len(scores) != len(items):
                raise ValueError(f"{where}: {len(scores)} scores for {len(items)} items")
            yield where, str(entry["user_id"]), items, scores, str(entry.get("split") or "test")


def _score(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: score {value!r}, expected a finite number")
    return number


def _phase(where: str, split: str) -> Phase:
    for phase in PHASES:
        if split == phase:
            return phase
    raise ValueError(f"{where}: split {split!r}, expected one of {', '.join(PHASES)}")
