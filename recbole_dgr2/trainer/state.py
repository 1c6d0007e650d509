"""The resumable state of an unfinished stage: a kill at any moment leaves the last whole state."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
BEFORE = -1  # the epoch of a validation of the starting weights


@dataclass
class Progress:
    """Where a run stands; all that the loop changes besides weights and optimizer.

    epoch and batch are the next ones to run, step counts optimizer steps. sums and weights add up the
    epoch's loss terms and metrics so far. best_loss is None before the first validation; worse counts
    validations since the best one. best_file names the weights of the best epoch, among the saved files.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    best_loss: float | None = None
    best_epoch: int | None = None
    best_file: str | None = None
    worse: int = 0
    stopped: bool = False
    saves: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def moment(epoch: float | None) -> str:
    """An epoch as the log tells it; `BEFORE` is none."""
    return "starting weights" if epoch == BEFORE else f"epoch {epoch:.0f}"


@dataclass(frozen=True)
class Resumed:
    """A state read back: progress, trainable weights by name, the optimizer's state, and what `keep` kept, if any."""

    progress: Progress
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    material: str | None = None


class PartialStore:
    """Reads and writes the resumable state in one folder.

    Every save writes new files under new names, then replaces `trainer_state.json`, which names them with
    their SHA-256, then removes the files that it no longer names. So whatever is cut short, the JSON
    describes a whole state.

    Args:
        folder: `<stage folder>.partial`.
        fingerprint: what the run is computed from; a state of another fingerprint is not resumed.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, str]) -> None:
        self.folder = folder
        self.fingerprint = dict(fingerprint)
        self._record: dict[str, Any] = {}  # the last one that was saved or loaded

    def load(self) -> Resumed | None:
        """Returns the saved state, or None where there is none that can be trusted (a warning says why)."""
        if not (self.folder / STATE_FILE).is_file():
            return None
        try:
            record = json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8"))
            changed = changed_parts(record["fingerprint"], self.fingerprint)
            if changed:
                logger.warning("%s: %s changed since, training starts anew", self.folder, ", ".join(changed))
                return None
            return self._read(record)
        except Exception as error:  # whatever is wrong with the files, the answer is the same
            logger.warning("%s: unreadable state (%s), training starts anew", self.folder, error)
            return None

    def _read(self, record: dict[str, Any]) -> Resumed:
        for name, digest in record["files"].items():
            if _sha256(self.folder / name) != digest:
                raise ValueError(f"{name} does not match its checksum")
        optimizer = torch.load(self.folder / record["optimizer"], map_location="cpu", weights_only=True)
        progress, weights = Progress(**record["progress"]), load_file(self.folder / record["model"])
        kept = record.get("material")
        material = (self.folder / kept).read_text(encoding="utf-8") if kept else None
        self._record = record
        return Resumed(progress, weights, optimizer, material)

    def save(
        self, progress: Progress, weights: dict[str, Tensor], optimizer: dict[str, Any], best: bool
    ) -> None:
        """Writes the state.

        Args:
            progress: where the run stands; `saves`, and `best_file` where `best`, are brought up to date.
            weights: trainable weights by name.
            optimizer: the optimizer's state.
            best: these weights are the best so far.

        Raises:
            OSError: the disk is full or not writable; the state before stays.
        """
        progress.saves += 1
        model, state = f"model-{progress.saves:06d}.safetensors", f"optimizer-{progress.saves:06d}.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        write_atomic(self.folder / model, lambda path: save_file(contiguous, path))
        write_atomic(self.folder / state, lambda path: torch.save(optimizer, path))
        if best:
            progress.best_file = model
        names = {model, state, progress.best_file or model}
        record = {"fingerprint": self.fingerprint, "model": model, "optimizer": state}
        material = _material_file(progress.epoch)
        if self._record.get("material") == material:
            names, record = {*names, material}, {**record, "material": material}
        self._write(record, names, progress)

    def keep(self, material: str, progress: Progress) -> None:
        """Keeps what the present epoch is trained on, until that epoch is over; a state must have been saved before.

        Raises:
            OSError: the disk is full or not writable; the state before stays.
        """
        name = _material_file(progress.epoch)
        write_atomic(self.folder / name, lambda path: path.write_text(material, encoding="utf-8"))
        record = {key: self._record[key] for key in ("fingerprint", "model", "optimizer")}
        names = {self._record["model"], self._record["optimizer"], progress.best_file or name, name}
        self._write({**record, "material": name}, names, progress)

    def _write(self, record: dict[str, Any], names: set[str], progress: Progress) -> None:
        """Replaces the JSON, with the checksums of the files in `names`; then all other files go."""
        files = {name: _sha256(self.folder / name) for name in names}
        self._record = {**record, "files": files, "progress": asdict(progress)}
        text = json.dumps(self._record, indent=1)
        write_atomic(self.folder / STATE_FILE, lambda path: path.write_text(text, encoding="utf-8"))
        for path in self.folder.iterdir():
            if path.name not in {*files, STATE_FILE}:
                path.unlink()

    def best_weights(self, progress: Progress) -> dict[str, Tensor] | None:
        """Returns the weights of the best validation, None where nothing was validated."""
        return load_file(self.folder / progress.best_file) if progress.best_file else None

    def remove(self) -> None:
        """Removes the folder, if it is there."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _material_file(epoch: int) -> str:
    return f"material-{epoch:06d}.json"


def changed_parts(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Returns the names of the fingerprint's parts that differ."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file beside its place, syncs it to disk, and moves it there in one step.

    Args:
        path: the final place.
        write: writes the content to the path it is given.

    Raises:
        OSError: the write failed; whatever was at `path` is untouched, and nothing else is left.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_of(parts: Iterable[object]) -> str:
    """Returns a short hash of values by their `repr` (numbers, strings, frozen dataclasses of them)."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()[:16]


def fingerprint_weights(model: nn.Module) -> str:
    """Returns a short hash of all weights of a model, names and bytes."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
