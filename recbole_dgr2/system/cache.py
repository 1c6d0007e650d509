"""What was computed once is kept on disk: candidates, scores and facts as Parquet tables, retrievers as checkpoints.

An entry is found by a hash of everything that decides its content (the *description*: data, retriever, options, split,
seed, format). Beside it lies a seal, a JSON file with the description and the SHA-256 of the content; an entry whose
seal is absent, of another description or of other bytes is never trusted: it is rebuilt, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LEFT_OVER = 86_400  # seconds after which nobody writes a file any more
FORMAT = 1
"""Version of what is stored and of the code that computes it: a change of either makes old entries unknown."""

logger = logging.getLogger(__name__)

Description = Mapping[str, Any]
Columns = dict[str, np.ndarray]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def digest_of(description: Any) -> str:
    """24 hexadecimal digits that stand for a JSON value."""
    text = json.dumps(description, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def data_fingerprint(folder: Path, name: str) -> dict[str, str]:
    """SHA-256 of every atomic file of the data set `name` in `folder`, by the file's name.

    Raises:
        FileNotFoundError: the folder holds no file of this data set.
    """
    files = sorted(path for path in folder.glob(f"{name}.*") if path.is_file()) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"{folder}: no atomic file of {name}, expected {name}.inter")
    return {path.name: file_digest(path) for path in files}


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    _atomic(path, lambda part: part.write_text(text, encoding="utf-8"))


class Cache:
    """Entries in one folder; None as folder keeps nothing and finds nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def table(self, kind: str, description: Description, build: Callable[[], Columns]) -> Columns:
        """The columns of a table, from disk where they are there and sound, else built and kept.

        Args:
            kind: first part of the file's name, e.g. "candidates".
            description: everything that decides the content.
            build: computes the columns; one-dimensional, of equal length.
        """
        path = self.path(kind, description)
        if path is None:
            return build()
        columns = self._read_table(path, description)
        if columns is None:
            columns = build()
            _atomic(path, lambda part: pd.DataFrame(columns).to_parquet(part, index=False))
            self.seal(path, description)
        return columns

    def path(self, kind: str, description: Description) -> Path | None:
        """Where a table is kept, whether it is there or not; None where nothing is kept."""
        return None if self.folder is None else self.folder / f"{kind}-{self.key(description)}.parquet"

    def key(self, description: Description) -> str:
        """The name of an entry without its kind."""
        return digest_of(self._whole(description))

    def seal(self, path: Path, description: Description, seconds: float | None = None) -> None:
        """Vouch for a finished file: from now on `sound` holds until a byte of it changes.

        `seconds` is how long it took to make, kept for reports.
        """
        content = {"description": self._whole(description), "sha256": file_digest(path), "seconds": seconds}
        write_text(_seal_of(path), json.dumps(content, indent=1, sort_keys=True, default=str) + "\n")

    def seconds(self, path: Path) -> float:
        """How long a sealed file took to make; 0 where nobody noted it."""
        return float(json.loads(_seal_of(path).read_text(encoding="utf-8")).get("seconds") or 0.0)

    def sound(self, path: Path, description: Description) -> bool:
        """Whether a file is there, whole, and of this description; a warning where it is there but not so."""
        if not path.exists():
            return False
        reason = self._fault(path, description)
        if reason:
            logger.warning("cache: %s %s; it is built again", path, reason)
        else:
            logger.info("cache: %s is used again", path)
        return not reason

    def _fault(self, path: Path, description: Description) -> str:
        try:
            seal = json.loads(_seal_of(path).read_text(encoding="utf-8"))
            written, digest = seal["description"], seal["sha256"]
        except FileNotFoundError:
            return "has no seal beside it"
        except (OSError, ValueError, KeyError, TypeError):
            return "has an unreadable seal"
        if written != json.loads(json.dumps(self._whole(description), default=str)):
            return "belongs to other data or options"
        try:
            return "" if file_digest(path) == digest else "is damaged (its checksum differs)"
        except OSError as error:
            return f"cannot be read ({error.strerror})"

    def _read_table(self, path: Path, description: Description) -> Columns | None:
        if not self.sound(path, description):
            return None
        frame = pd.read_parquet(path)
        return {str(name): frame[name].to_numpy() for name in frame.columns}

    def _whole(self, description: Description) -> dict[str, Any]:
        return {"format": FORMAT, **description}


def link_files(paths: Iterable[Path], folder: Path) -> None:
    """The same files in another folder, as hard links where the file system can, else as copies.

    For entries of the cache, which are replaced and never written into; a user's own file needs `copy_file`.
    """
    for path in paths:
        _put(path, folder / path.name, _link)


def copy_file(path: Path, target: Path) -> None:
    """A copy of a file, whole or not at all, that no later change of the file reaches."""
    _put(path, target, shutil.copy2)


def _put(path: Path, target: Path, write: Callable[[Path, Path], Any]) -> None:
    if path.resolve() != target.resolve():
        _atomic(target, lambda part: write(path, part))


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.seal.json")


def _atomic(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
        part = Path(folder) / path.name
        write(part)
        part.replace(path)


def _sweep(folder: Path) -> None:
    """Remove what programs that were killed while they wrote left in a folder; others may be writing there now."""
    for left in folder.glob(".part-*"):
        with suppress(FileNotFoundError):  # its program has just finished
            if time.time() - left.stat().st_mtime > LEFT_OVER:
                shutil.rmtree(left, ignore_errors=True)
