"""Folders of stages: nothing is lost, nothing is half written, what does not fit is refused with the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.model import checkpoint
from recbole_dgr2.model.backbone import reserve_mask_id
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import (
    StageInfo,
    load_stage,
    read_info,
    require_block_diffusion,
    require_same_data,
    save_stage,
)
from tests.tiny import ARCHITECTURES, LABELS, tiny_backbone

DATA = {"vocabulary": "abc", "n_candidates": 10}
TEACHER = StageInfo("ar_teacher", "embedded", None, DATA, 7)


def _converted(mask_id: int = 320) -> StageInfo:
    return StageInfo("conversion", "saved/ar_teacher", BlockDiffusionSpec(8, mask_id, "block"), DATA, 7)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_round_trip(architecture: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(architecture)
    info = _converted(reserve_mask_id(backbone))
    folder = tmp_path / "deep" / "conversion"
    save_stage(folder, backbone, info)
    loaded, loaded_info = load_stage(folder)
    assert loaded_info == info and require_block_diffusion(loaded_info, folder) == info.block_diffusion
    one, two = backbone.model.state_dict(), loaded.model.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert loaded.tokenizer.get_vocab() == backbone.tokenizer.get_vocab()
    text = '["<c3>","<c7>"] é漢'
    assert loaded.tokenizer.encode(text) == backbone.tokenizer.encode(text)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text), skip_special_tokens=True) == text
    assert all(len(loaded.tokenizer.encode(label)) == 1 for label in LABELS)
    assert (loaded.eos_id, loaded.pad_id) == (backbone.eos_id, backbone.pad_id)
    assert loaded.model.config._attn_implementation == "sdpa" and not loaded.model.training
    assert [p.name for p in folder.parent.iterdir()] == ["conversion"], "no temporary folder is left"
    assert not [p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl")]


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_stage(tmp_path / "s", tiny_backbone(seed=1), TEACHER)
    save_stage(tmp_path / "s", tiny_backbone(seed=2), TEACHER)
    weight = load_stage(tmp_path / "s")[0].model.get_input_embeddings().weight
    assert torch.equal(weight, tiny_backbone(seed=2).model.get_input_embeddings().weight)


@pytest.mark.parametrize("there", [False, True])
def test_a_crash_leaves_the_old_state(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if there:
        save_stage(tmp_path / "s", tiny_backbone(), TEACHER)

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    backbone = tiny_backbone(seed=3)
    monkeypatch.setattr(type(backbone.tokenizer), "save_pretrained", crash)
    with pytest.raises(KeyboardInterrupt):
        save_stage(tmp_path / "s", backbone, TEACHER)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == (["s"] if there else [])
    if there:
        assert load_stage(tmp_path / "s")[1] == TEACHER


def test_a_crash_between_the_renames_restores_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    save_stage(folder, tiny_backbone(), TEACHER)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target == folder and not self.name.endswith(".old"):
            raise OSError("disk full")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="disk full"):
        save_stage(folder, tiny_backbone(seed=3), TEACHER)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["s"] and load_stage(folder)[1] == TEACHER


def test_missing_and_foreign_folders(tmp_path: Path) -> None:
    save_stage(tmp_path / "ar_teacher", tiny_backbone(), TEACHER)
    with pytest.raises(ValueError, match=r"nearest: .*ar_teacher"):
        load_stage(tmp_path / "ar_teachr")
    (tmp_path / "ar_teacher" / "dgr2.json").unlink()
    with pytest.raises(ValueError, match=r"dgr2\.json is missing.*run the stage again"):
        load_stage(tmp_path / "ar_teacher")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON.*run the stage again"),
        ("[]", "a JSON list, not an object; run the stage again"),
        ("{}", "format None"),
        (json.dumps(TEACHER.to_dict() | {"format": 99}), "format 99, expected 1"),
        (json.dumps(TEACHER.to_dict() | {"seed": "x"}), r"\['seed'\]"),
        (json.dumps(TEACHER.to_dict() | {"extra": 1}), r"\['extra'\]"),
        (json.dumps(TEACHER.to_dict() | {"block_diffusion": {"block_size": 4}}), "mask_id"),
    ],
)
def test_damaged_info(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "dgr2.json").write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        read_info(tmp_path)
    assert "dgr2.json" in str(error.value) and "\n" not in str(error.value)


def test_damaged_or_pickled_weights(tmp_path: Path) -> None:
    save_stage(tmp_path, tiny_backbone(), TEACHER)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="its weights are not those that were saved"):
        load_stage(tmp_path)
    info = json.loads((tmp_path / "dgr2.json").read_text())  # a folder from before its weights were noted
    (tmp_path / "dgr2.json").write_text(json.dumps({key: info[key] for key in info if key != "weights"}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_stage(tmp_path)
    weights.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="never loaded"):
        load_stage(tmp_path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save_stage(tmp_path / "s", tiny_backbone(), TEACHER)
    weights = tmp_path / "s" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="not those that were saved; put them back, or run the stage again"):
        load_stage(tmp_path / "s")


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    for name in (".s.new", ".s.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    save_stage(tmp_path / "s", tiny_backbone(), TEACHER)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert load_stage(tmp_path / "s")[1] == TEACHER


def test_mask_id_must_be_a_free_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="384 embedding rows"):
        save_stage(tmp_path / "s", tiny_backbone(), _converted(384))
    assert not list(tmp_path.iterdir())
    save_stage(tmp_path / "s", tiny_backbone(), _converted(320))
    path = tmp_path / "s" / "dgr2.json"
    path.write_text(path.read_text().replace("320", "311"))
    with pytest.raises(ValueError, match="'<c2>'"):
        load_stage(tmp_path / "s")


def test_an_autoregressive_checkpoint_names_the_conversion(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved/ar.*'ar_teacher'.*'conversion' stage"):
        require_block_diffusion(TEACHER, Path("saved/ar"))


def test_another_data_set(tmp_path: Path) -> None:
    require_same_data(TEACHER, tmp_path, DATA)
    with pytest.raises(ValueError, match="vocabulary is 'abc', here 'xyz'"):
        require_same_data(TEACHER, tmp_path, {"vocabulary": "xyz"})
    with pytest.raises(ValueError, match="prompt is None, here 'p'"):
        require_same_data(TEACHER, tmp_path, {"prompt": "p"})


def test_adapters_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    backbone = tiny_backbone()
    adapted = peft.get_peft_model(backbone.model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match="merge_and_unload"):
        save_stage(tmp_path / "s", checkpoint.Backbone(adapted, backbone.tokenizer), TEACHER)
    assert not list(tmp_path.iterdir())
