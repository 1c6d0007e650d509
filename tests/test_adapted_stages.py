"""Stages under an adapter: what is trained, saved, found again, refused, and handed on in a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.config import Config
from recbole_dgr2.decode import DecodeOptions
from recbole_dgr2.model.adapters import Adapted, AdapterOptions, Base, adapt, adapter_off, merge
from recbole_dgr2.model.backbone import start_mask_row
from recbole_dgr2.model.checkpoint import StageInfo, load_adapted, load_stage, save_stage
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.pipeline.adapting import adapted, started, teacher_of
from recbole_dgr2.trainer import Conversion, Distillation, convert
from recbole_dgr2.trainer.distillation import DistillationOptions
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import BaseTeacher, frozen_teacher
from tests.adapting import INPUT, SIZE, TEACHER, converted, logits, stir
from tests.test_conversion import TRAIN, Mortal
from tests.tiny import LABELS, tiny_backbone, tiny_model
from tests.training import OPTIONS, Killed


def conversion(folder: Path, kind: type = Conversion, **changes: Any) -> Any:
    backbone, spec = converted(folder)
    return kind(backbone, replace(OPTIONS, epochs=2, **changes), {}, spec, NoiseOptions(), 0.5)


def test_a_stage_trains_and_saves_the_adapter_alone(tmp_path: Path) -> None:
    stage = conversion(tmp_path / "ar_teacher")
    frozen = {n: p.clone() for n, p in stage.backbone.model.named_parameters() if not p.requires_grad}
    stage.fit(TRAIN, [], tmp_path / "conversion")
    now = dict(stage.backbone.model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    names = {path.name for path in (tmp_path / "conversion").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "dgr2.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    info = json.loads((tmp_path / "conversion" / "dgr2.json").read_text())
    assert info["base"]["source"] == "../ar_teacher"
    peft_config = json.loads((tmp_path / "conversion" / "adapter_config.json").read_text())
    assert peft_config["base_model_name_or_path"] == "../ar_teacher"
    shutil.move(tmp_path / "conversion", tmp_path / "moved" / "conversion")
    shutil.move(tmp_path / "ar_teacher", tmp_path / "moved" / "ar_teacher")
    apart, info_apart = load_adapted(tmp_path / "moved" / "conversion")
    assert isinstance(apart, Adapted) and torch.equal(logits(apart), logits(stage.backbone))
    assert apart.options == stage.backbone.options and info_apart.block_diffusion == stage.spec
    whole, _ = load_stage(tmp_path / "moved" / "conversion")
    assert not isinstance(whole, Adapted) and not hasattr(whole.model, "get_base_model")
    assert torch.allclose(logits(whole), logits(stage.backbone), atol=1e-5)
    teacher, _ = load_stage(tmp_path / "moved" / "ar_teacher")
    ids = INPUT.clamp(max=319)
    with adapter_off(apart.model):
        assert torch.equal(logits(apart, ids)[..., :320], logits(teacher, ids)[..., :320])


def test_reused_killed_and_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher, folder = tmp_path / "ar_teacher", tmp_path / "conversion"
    first = conversion(teacher)
    first.fit(TRAIN, [], folder)
    again = conversion(teacher)
    again.fit([*TRAIN], [], folder)
    assert torch.equal(logits(again.backbone), logits(first.backbone))
    killed = conversion(teacher, Mortal, save_step=1)
    killed.lives = 4
    with pytest.raises(Killed):
        killed.fit(TRAIN, [], tmp_path / "killed" / "conversion")
    resumed = conversion(teacher, save_step=1)
    resumed.fit(TRAIN, [], tmp_path / "killed" / "conversion")
    assert torch.equal(logits(resumed.backbone), logits(first.backbone))
    backbone, spec = convert(tiny_backbone(), 4)
    start_mask_row(backbone, spec.mask_id)
    other = adapt(backbone, replace(SIZE, alpha=1.0), Base.of(teacher, backbone), [*range(310, 321)], seed=0)
    with caplog.at_level("INFO"):
        stage = Conversion(other, replace(OPTIONS, epochs=2), {}, spec, NoiseOptions(), 0.5)
        stage.fit(TRAIN, [], folder)
    assert "options changed" in caplog.text, "another alpha is another stage"


def test_the_teacher_is_the_student_without_its_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "ar_teacher"
    student, spec = converted(folder)
    stir(student)
    shared = teacher_of(student, spec, folder)
    apart = frozen_teacher(load_stage(folder)[0], student, spec)
    assert isinstance(shared, BaseTeacher) and shared.model is student.model
    assert not isinstance(teacher_of(merge(converted(folder)[0]), spec, folder), BaseTeacher)
    found = []
    for teacher in (shared, apart):
        decoding = DecodeOptions("block", 11, 8, tau=0.01, temperature=1.0)
        options = replace(OPTIONS, epochs=1, train_batch_size=3)
        student, _ = converted(folder)
        stir(student)
        teacher = BaseTeacher(student) if teacher is shared else teacher
        stage = Distillation(
            Roller(student, spec, decoding), options, {}, teacher, DistillationOptions(prompts=3, samples=2)
        )
        before = stage.settings()["teacher"]
        stage.fit(TRAIN[:4], [], tmp_path / type(teacher).__name__)
        assert stage.settings()["teacher"] == before, "training does not reach the teacher"
        found.append(logits(student))
    assert torch.allclose(found[0], found[1], atol=1e-5)


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _other(path: Path) -> None:
    save_stage(path, tiny_backbone(seed=9), TEACHER)


def _resize(path: Path) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "r": 4}))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("ar_teacher", shutil.rmtree, "lies over .*ar_teacher, which is not there"),
        ("ar_teacher", _other, "whose weights are others now"),
        ("conversion/adapter_model.safetensors", _damage, "its weights are not those that were saved"),
        ("conversion/adapter_config.json", _damage, "adapter_config.json cannot be read"),
        ("conversion/adapter_config.json", _resize, r"lora_A.weight: \(2, 32\), expected \(4, 32\)"),
    ],
    ids=["base gone", "base changed", "weights damaged", "settings damaged", "other rank"],
)
def test_what_does_not_fit_is_refused(
    name: str, change: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    backbone, spec = converted(tmp_path / "ar_teacher")
    save_stage(tmp_path / "conversion", backbone, StageInfo("conversion", "ar_teacher", spec))
    change(tmp_path / name)
    with pytest.raises(ValueError, match=reason) as error:
        load_stage(tmp_path / "conversion")
    assert "\n" not in str(error.value)


def test_a_pretrained_base_is_found_again_by_name(tmp_path: Path) -> None:
    """The teacher's adapter lies over a folder outside the run that has neither the labels nor their rows."""
    from recbole_dgr2.model.backbone import load_backbone, train_tokenizer

    source = tmp_path / "pretrained"
    tiny_model(vocab_size=311).save_pretrained(source)
    train_tokenizer(["some text"], 300, ()).save_pretrained(source)
    backbone = load_backbone(source, LABELS)
    ids = backbone.tokenizer.convert_tokens_to_ids(list(LABELS))
    student = adapt(backbone, SIZE, Base.of(source, backbone), ids, seed=0)
    stir(student)
    save_stage(tmp_path / "run" / "ar_teacher", student, TEACHER)
    loaded, info = load_stage(tmp_path / "run" / "ar_teacher")
    assert info.base is not None and info.base.source == str(source)
    known = torch.tensor([[5, 7, *ids]])
    assert torch.allclose(logits(loaded, known)[..., :310], logits(student, known)[..., :310], atol=1e-5)
    assert loaded.tokenizer.encode(LABELS[0]) == [ids[0]]


class TestOfARun:
    def test_off_by_default(self, toy_config: Callable[..., Config], tmp_path: Path) -> None:
        backbone = tiny_backbone()
        assert adapted(toy_config(), backbone, tmp_path, LABELS) is backbone

    def test_labels_and_mask_are_trained(self, toy_config: Callable[..., Config], tmp_path: Path) -> None:
        config = toy_config(lora_rank=2, lora_alpha=6.0, lora_targets=["q_proj", "v_proj"])
        save_stage(tmp_path / "ar_teacher", tiny_backbone(), TEACHER)
        found = adapted(config, tiny_backbone(), tmp_path / "ar_teacher", LABELS, 320)
        assert isinstance(found, Adapted)
        assert found.options == AdapterOptions(2, 6.0, ("q_proj", "v_proj"))
        embedding: Any = found.model.get_input_embeddings()
        assert embedding.token_adapter.token_indices["default"] == [*range(310, 321)]

    def test_what_a_finished_stage_hands_on(self, toy_config: Callable[..., Config], tmp_path: Path) -> None:
        config = toy_config(lora_rank=2, lora_alpha=4.0)
        backbone, spec = converted(tmp_path / "ar_teacher")
        info = StageInfo("conversion", "ar_teacher", spec)
        folder = tmp_path / "conversion"
        assert started(config, backbone, info, folder, LABELS) is backbone, "a student keeps its adapter"
        with pytest.raises(ValueError, match=r"lora_rank 3: the adapter in .*conversion has 2"):
            started(toy_config(lora_rank=3, lora_alpha=4.0), backbone, info, folder, LABELS)
        with pytest.raises(ValueError, match="lora_targets"):
            wrong = toy_config(lora_rank=2, lora_alpha=4.0, lora_targets=["q_proj"])
            started(wrong, backbone, info, folder, LABELS)
        assert not isinstance(started(config, backbone, TEACHER, folder, LABELS), Adapted)
        save_stage(folder, tiny_backbone(), info)
        fresh = started(config, tiny_backbone(), info, folder, LABELS)
        assert isinstance(fresh, Adapted) and fresh.base.source == str(folder)


@pytest.mark.slow
def test_a_whole_run_and_its_second_start(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All stages with adapters on the toy data; a second start reuses all of them; the teacher is never read twice."""
    from recbole_dgr2.pipeline import adapting
    from tests.toy_run import run

    def never(*_: Any) -> Any:
        raise AssertionError("a second copy of the teacher was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapting, "frozen_teacher", never)
        first = run(here, lora_rank=2, distillation_teacher="ar_teacher")
        with caplog.at_level("INFO"):
            second = run(here, lora_rank=2, distillation_teacher="ar_teacher")
    folder = next((here / "saved").glob("toy-*"))
    for name, parent in (("conversion", "../ar_teacher"), ("reinforcement", "../ar_teacher")):
        assert json.loads((folder / name / "dgr2.json").read_text())["base"]["source"] == parent
    assert caplog.text.count("is finished and up to date, reused") == 4
    accuracy = [[(row["name"], row["hits"]) for row in report["rows"]] for report in (first, second)]
    assert accuracy[0] == accuracy[1]
