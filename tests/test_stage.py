"""The training loop, tried on the AR teacher: gradients, what is saved, early stopping, precision, bad losses."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recbole_dgr2.data.examples import collate
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.trainer import ARTeacher
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.scoring import Scored
from recbole_dgr2.trainer.state import STATE_FILE
from tests.tiny import tiny_backbone
from tests.training import OPTIONS, TRAIN, VALID, Mortal, fitted, same, weights


def gradients(micro: int, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The gradient of one optimizer step on 8 examples."""
    backbone = tiny_backbone()
    options = replace(OPTIONS, epochs=1, train_batch_size=8, eval_step=0, clip_grad_norm=1e9)
    options = replace(options, micro_batch_size=micro)
    found: dict[str, torch.Tensor] = {}

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        found.update({name: p.grad.clone() for name, p in backbone.model.named_parameters()})

    handle = register_optimizer_step_pre_hook(keep)
    try:
        ARTeacher(backbone, options, {}).fit(TRAIN[:8], [], tmp_path / f"micro{micro}")
    finally:
        handle.remove()
    return found


def test_one_batch_of_8_is_two_of_4(tmp_path: Path) -> None:
    whole, halves, ragged = (gradients(micro, tmp_path) for micro in (0, 4, 3))
    for name, gradient in whole.items():
        torch.testing.assert_close(halves[name], gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ragged[name], gradient, rtol=1e-4, atol=1e-6)


def test_saved_stage_is_the_trained_backbone_and_says_so(tmp_path: Path) -> None:
    trained = fitted(tmp_path / "stage")
    backbone, info = load_stage(tmp_path / "stage")
    assert same(weights(backbone), trained)
    assert (info.stage, info.seed, info.data["n"]) == ("ar_teacher", 7, 10)
    history = info.data["training"]["history"]
    assert [record["epoch"] for record in history] == [0.0, 1.0]
    assert history[1]["train_loss"] < history[0]["train_loss"]


def test_no_epochs_saves_the_parent(tmp_path: Path) -> None:
    assert same(fitted(tmp_path / "stage", epochs=0), weights(tiny_backbone()))
    assert same(weights(load_stage(tmp_path / "stage")[0]), weights(tiny_backbone()))


def test_early_stopping_keeps_the_best_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backbone = tiny_backbone()
    options = replace(OPTIONS, epochs=30, stopping_step=1, learning_rate=3e-2)
    stage = ARTeacher(backbone, options, {})
    stage.fit(TRAIN, VALID, tmp_path / "stage")  # random tokens: what is learnt does not carry over
    training = load_stage(tmp_path / "stage")[1].data["training"]
    losses = [record["valid_loss"] for record in training["history"]]
    best = int(np.argmin(losses))
    assert training["best_epoch"] == best and len(losses) == best + 3 < 30
    with torch.no_grad():
        loss, _ = stage.loss(collate(VALID, 0), generators(0, 0, range(6)))
    assert float(loss) == pytest.approx(losses[best], rel=1e-5)
    assert "epoch 0 training [time: " in caplog.text and ", train loss: " in caplog.text


def test_non_finite_loss_names_stage_epoch_step_and_samples(tmp_path: Path) -> None:
    class Exploding(Mortal):
        def score(self, model: torch.nn.Module, prepared: Scored) -> dict[str, torch.Tensor]:
            sums = super().score(model, prepared)
            return {**sums, "nll": sums["nll"] * (math.nan if self.lives == -4 else 1.0)}

    message = r"stage ar_teacher, epoch 0, step 3: loss nan.*samples 1\d\d, "
    with pytest.raises(FloatingPointError, match=message) as caught:
        Exploding(tiny_backbone(), OPTIONS, {}).fit(TRAIN, VALID, tmp_path / "stage")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "stage.partial" / STATE_FILE).is_file()
    assert not (tmp_path / "stage").exists()


def test_non_finite_validation_loss_ends_the_stage(tmp_path: Path) -> None:
    class Blind(ARTeacher):
        def score(self, model: torch.nn.Module, prepared: Scored) -> dict[str, torch.Tensor]:
            sums = super().score(model, prepared)
            return {**sums, "nll": sums["nll"] * (1.0 if torch.is_grad_enabled() else math.nan)}

    with pytest.raises(FloatingPointError, match=r"stage ar_teacher, epoch 0: validation loss nan"):
        Blind(tiny_backbone(), OPTIONS, {}).fit(TRAIN, VALID, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()  # the first weights would pass for the best


def test_dropout_is_off_in_training(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    for layer in backbone.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.5))
    ARTeacher(backbone, OPTIONS, {"n": 10}).fit(TRAIN, VALID, tmp_path / "dropout")
    assert same(weights(backbone), fitted(tmp_path / "none"))


def test_bf16_is_close_and_restores_the_model(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    stage = ARTeacher(backbone, replace(OPTIONS, mixed_precision="bf16"), {})
    stage.fit(TRAIN, VALID, tmp_path / "half")
    fitted(tmp_path / "full")
    losses = [
        load_stage(tmp_path / name)[1].data["training"]["history"][-1]["valid_loss"]
        for name in ("half", "full")
    ]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    assert next(backbone.model.parameters()).dtype == torch.float32


def test_no_examples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training examples"):
        ARTeacher(tiny_backbone(), OPTIONS, {}).fit([], [], tmp_path / "stage")
