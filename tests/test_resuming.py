"""What survives a kill: a stage resumed, reused or trained anew, and files that were cut short."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.trainer import ARTeacher
from recbole_dgr2.trainer.state import STATE_FILE, PartialStore, Progress, write_atomic
from tests.tiny import tiny_backbone
from tests.training import OPTIONS, TRAIN, VALID, Killed, Mortal, fitted, same, weights


@pytest.mark.parametrize("death", [1, 4, 6, 7, 11])
def test_killed_and_resumed_is_the_unbroken_run(death: int, tmp_path: Path) -> None:
    unbroken = fitted(tmp_path / "unbroken")
    broken = Mortal(tiny_backbone(), OPTIONS, {"n": 10})
    broken.lives = death
    with pytest.raises(Killed):
        broken.fit(TRAIN, VALID, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    resumed = Mortal(tiny_backbone(), OPTIONS, {"n": 10})
    resumed.fit(TRAIN, VALID, tmp_path / "broken")
    assert same(weights(resumed.backbone), unbroken)
    if death > 2:
        assert resumed.lives > -14  # of 2 * (5 + 2) batches some were not computed again
    assert not (tmp_path / "broken.partial").exists()
    broken_info, unbroken_info = (load_stage(tmp_path / name)[1] for name in ("broken", "unbroken"))
    assert broken_info == unbroken_info


def test_finished_stage_is_reused_and_a_changed_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "stage"
    first = fitted(folder)
    stage = Mortal(tiny_backbone(), OPTIONS, {"n": 10})
    stage.lives = 1
    stage.fit(TRAIN, VALID, folder)
    assert same(weights(stage.backbone), first)
    assert "reused" in caplog.text
    assert same(fitted(folder, progress=True, save_step=0), first)  # neither decides what is computed
    other = fitted(folder, learning_rate=5e-3)
    assert not same(other, first)
    assert "options changed" in caplog.text
    assert same(weights(load_stage(folder)[0]), other)
    other_data = ARTeacher(tiny_backbone(), replace(OPTIONS, learning_rate=5e-3), {"n": 10})
    other_data.fit(TRAIN[1:], VALID, folder)
    assert "training examples changed" in caplog.text


def test_unreadable_finished_stage_is_trained_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "stage"
    first = fitted(folder)
    next(folder.glob("*.safetensors")).write_bytes(b"torn")
    assert same(fitted(folder), first)
    assert "cannot be reused" in caplog.text


def broken_state(folder: Path) -> Path:
    stage = Mortal(tiny_backbone(), OPTIONS, {"n": 10})
    stage.lives = 9
    with pytest.raises(Killed):
        stage.fit(TRAIN, VALID, folder)
    return folder.with_name(f"{folder.name}.partial")


@pytest.mark.parametrize("victim", ["model", "optimizer", "json", "fields", "missing"])
def test_corrupt_state_is_never_trusted(
    victim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = broken_state(tmp_path / "stage")
    record = json.loads((partial / STATE_FILE).read_text())
    if victim in ("model", "optimizer"):
        data = bytearray((partial / record[victim]).read_bytes())
        data[len(data) // 2] ^= 1
        (partial / record[victim]).write_bytes(data)
    elif victim == "missing":
        (partial / record["model"]).unlink()
    else:
        text = '{"half' if victim == "json" else json.dumps({**record, "progress": {"wrong": 1}})
        (partial / STATE_FILE).write_text(text)
    assert same(fitted(tmp_path / "stage"), fitted(tmp_path / "other"))
    assert "unreadable state" in caplog.text


def test_state_of_other_options_is_not_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken_state(tmp_path / "stage")
    assert same(fitted(tmp_path / "stage", seed=8), fitted(tmp_path / "other", seed=8))
    assert "options changed" in caplog.text


def test_killed_while_saving_the_stage_finishes_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, backbone: Backbone, info: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("recbole_dgr2.trainer.stage.save_stage", full)
        with pytest.raises(OSError, match="No space"):
            fitted(tmp_path / "stage")
    assert not (tmp_path / "stage").exists()
    stage = Mortal(tiny_backbone(), OPTIONS, {"n": 10})
    stage.lives = 1
    stage.fit(TRAIN, VALID, tmp_path / "stage")
    assert same(weights(stage.backbone), fitted(tmp_path / "other"))


def test_full_disk_keeps_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PartialStore(tmp_path / "p", {"a": "1"})
    store.save(Progress(step=1), {"w": torch.ones(2)}, {"state": {}}, best=True)

    def full(content: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        store.save(Progress(step=2, saves=1), {"w": torch.zeros(2)}, {"state": {}}, best=False)
    resumed = store.load()
    assert resumed is not None and resumed.progress.step == 1 and resumed.weights["w"].tolist() == [1.0, 1.0]
    assert not list((tmp_path / "p").glob("*.tmp"))


def test_old_files_go_but_the_best_stay(tmp_path: Path) -> None:
    store, progress = PartialStore(tmp_path / "p", {}), Progress()
    for step in range(3):
        store.save(progress, {"w": torch.full((1,), float(step))}, {}, best=step == 0)
    best = store.best_weights(progress)
    assert best is not None and best["w"].item() == 0.0
    suffixes = sorted(path.suffix for path in (tmp_path / "p").iterdir())
    assert suffixes == [".json", ".pt", ".safetensors", ".safetensors"]


def test_write_atomic_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half(target: Path) -> None:
        target.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, half)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
