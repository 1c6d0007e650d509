"""The training loop: options, order, accumulation, resuming, reuse, corruption; tried on the AR teacher."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recbole_dgr2.data.examples import Batch, Example, collate
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.trainer import ARTeacher, StageOptions
from recbole_dgr2.trainer.batches import epoch_batches, generators, process_share, sorted_batches
from recbole_dgr2.trainer.optimizers import parameter_groups
from recbole_dgr2.trainer.options import learning_rate_at
from recbole_dgr2.trainer.scoring import Scored
from recbole_dgr2.trainer.state import STATE_FILE, PartialStore, Progress, write_atomic
from tests.tiny import random_tokens, tiny_backbone

OPTIONS = StageOptions(
    epochs=2,
    learning_rate=1e-2,
    train_batch_size=4,
    warmup_ratio=0.1,
    weight_decay=0.01,
    clip_grad_norm=1.0,
    eval_step=1,
    stopping_step=5,
    reasoning_weight=0.5,
    answer_weight=1.0,
    save_step=2,
    seed=7,
    progress=False,
)


def examples(n: int, seed: int = 0) -> list[Example]:
    """Copy task: the response repeats the first tokens of the prompt, then EOS; lengths differ."""
    rows = random_tokens([4 + i % 5 for i in range(n)], seed)
    answer = [(*tuple(row[: 2 + i % 3]), 1) for i, row in enumerate(rows)]
    return [Example(100 + i, tuple(row), answer[i], 1) for i, row in enumerate(rows)]


TRAIN, VALID = examples(18), examples(6, seed=1)


class Killed(Exception):
    """Stands for the kill of the process."""


class Mortal(ARTeacher):
    """Dies when it prepares its n-th training batch."""

    lives = 0

    def prepare(self, batch: Batch, generators: Sequence[torch.Generator]) -> Scored:
        self.lives -= 1
        if self.lives == 0:
            raise Killed
        return super().prepare(batch, generators)


def weights(backbone: Backbone) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def fitted(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    backbone = tiny_backbone()
    ARTeacher(backbone, replace(OPTIONS, **changes), {"n": 10}).fit(TRAIN, VALID, folder)
    return weights(backbone)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", -1),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("train_batch_size", 0),
        ("warmup_ratio", 1.0),
        ("weight_decay", -0.1),
        ("clip_grad_norm", 0.0),
        ("eval_step", -1),
        ("stopping_step", -1),
        ("reasoning_weight", -1.0),
        ("answer_weight", 0.0),
        ("save_step", -1),
        ("seed", -1),
        ("micro_batch_size", -1),
        ("lr_schedule", "step"),
        ("mixed_precision", "fp16"),
    ],
)
def test_bad_option_is_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        replace(OPTIONS, **{name: value})
    assert "\n" not in str(caught.value)


def test_learning_rate_by_hand() -> None:
    options = replace(OPTIONS, learning_rate=1.0, warmup_ratio=0.2, lr_schedule="linear")
    rates = [learning_rate_at(step, 10, options) for step in range(11)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    cosine = replace(options, lr_schedule="cosine")
    assert learning_rate_at(6, 10, cosine) == pytest.approx(0.5)
    assert learning_rate_at(10, 10, cosine) == pytest.approx(0.0)
    assert learning_rate_at(0, 1, replace(options, warmup_ratio=0.0)) == 1.0


def test_decay_skips_norms_and_embeddings() -> None:
    model = tiny_backbone().model
    decay, keep = parameter_groups(model.modules(), 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(names[id(p)] for p in decay["params"] + keep["params"]) == sorted(names.values())
    kept = [names[id(parameter)] for parameter in keep["params"]]
    assert all("norm" in name or "embed" in name for name in kept)
    assert not any("norm" in names[id(p)] or "embed" in names[id(p)] for p in decay["params"])
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=200), st.integers(1, 9), st.integers(0, 3))
def test_epoch_holds_every_example_once(lengths: list[int], size: int, epoch: int) -> None:
    batches = epoch_batches(np.array(lengths), size, 3, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    again = epoch_batches(np.array(lengths), size, 3, epoch)
    assert all(np.array_equal(one, two) for one, two in zip(batches, again, strict=True))
    by_length = np.concatenate(sorted_batches(np.array(lengths), size))
    assert sorted(by_length.tolist()) == list(range(len(lengths)))


def test_batches_are_of_like_length_and_differ_between_epochs() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 256)
    first, second = (epoch_batches(lengths, 8, 0, epoch) for epoch in (0, 1))
    assert np.mean([np.ptp(lengths[batch]) for batch in first]) < 12
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 4))
def test_processes_share_a_batch_exactly(n: int, world: int, micro: int) -> None:
    shares = [process_share(np.arange(n), rank, world, micro) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(np.concatenate([part for share in shares for part in share]).tolist()) == list(range(n))


def test_noise_is_keyed_by_seed_step_and_sample() -> None:
    draw = {
        (seed, step, key): torch.rand(4, generator=generators(seed, step, [5, key])[1]).tolist()
        for seed in (0, 1)
        for step in (-1, 0, 1)
        for key in (0, 1)
    }
    assert len({tuple(values) for values in draw.values()}) == len(draw)
    assert torch.rand(4, generator=generators(1, 0, [1])[0]).tolist() == draw[1, 0, 1]


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
