"""Mid-training: its loss is the teacher's, it resumes, it teaches, and it comes before the teacher in a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recbole_dgr2.config import Config
from recbole_dgr2.data.examples import collate
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.sid_lessons import encode_sid_lessons, sid_lesson_texts, write_sid_lessons
from recbole_dgr2.model.backbone import Backbone, EmbeddedSpec, build_embedded, load_backbone, train_tokenizer
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.training import sid_tokens
from recbole_dgr2.trainer import ARTeacher, MidTraining
from tests.test_sid_lessons import sequences
from tests.tiny import tiny_backbone
from tests.toy_run import run
from tests.training import OPTIONS, TRAIN, Dying, Killed, same, weights

SPEC = EmbeddedSpec(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64)
NAMES = ("lamp", "vase", "rug", "desk", "sofa", "bowl")
ITEMS = ItemText(
    titles=("", *NAMES),
    categories=((),) * 7,
    brands=("",) * 7,
    sids={item: f"<a_{(item - 1) % 2}><b_{(item - 1) // 2}>" for item in range(1, 7)},
)
LESSONS = write_sid_lessons(ITEMS, sequences([1, 2, 3, 4, 5, 6] * 2, n_items=7), 0, 100, 0)
ADDED = ["<a_0>", "<a_1>", "<b_0>", "<b_1>", "<b_2>"]


def fresh() -> Backbone:
    return build_embedded(SPEC, train_tokenizer(sid_lesson_texts(LESSONS), 340, ADDED), seed=0)


def test_the_loss_is_the_teachers() -> None:
    batch = collate(TRAIN[:4], 0)
    losses = [stage(tiny_backbone(), OPTIONS, {}).loss(batch, [])[0] for stage in (ARTeacher, MidTraining)]
    assert torch.equal(losses[0], losses[1])


def test_it_learns_next_items_and_texts(tmp_path: Path) -> None:
    backbone = fresh()
    options = replace(OPTIONS, epochs=25, learning_rate=2e-2, train_batch_size=8, eval_step=0, save_step=0)
    examples = encode_sid_lessons(LESSONS, backbone.tokenizer)
    stage = MidTraining(backbone, options, {})
    stage.fit(examples, [], tmp_path / "mid_training")
    _, means = stage.loss(collate(examples, 0), [])
    assert means["nll_accuracy"] > 0.8
    _, info = load_stage(tmp_path / "mid_training")
    assert (info.stage, info.parent, info.block_diffusion) == ("mid_training", None, None)


class Mortal(Dying, MidTraining):
    """Mid-training, dying."""


def test_a_killed_stage_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options = replace(OPTIONS, eval_step=0)

    def stage(kind: type[MidTraining]) -> MidTraining:
        return kind(fresh(), options, {"n": 1})

    straight, broken = stage(MidTraining), stage(Mortal)
    examples = encode_sid_lessons(LESSONS, straight.backbone.tokenizer)
    straight.fit(examples, [], tmp_path / "straight")
    broken.lives = 5  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        broken.fit(examples, [], tmp_path / "broken")
    resumed = stage(MidTraining)
    resumed.fit(examples, [], tmp_path / "broken")
    assert same(weights(resumed.backbone), weights(straight.backbone))


def test_tokens_of_semantic_ids_start_near_the_mean_and_apart(tmp_path: Path) -> None:
    """In a pretrained model, whose other rows stay as they were; all rows the same whatever was drawn before."""
    backbone = tiny_backbone()
    backbone.model.save_pretrained(tmp_path)
    backbone.tokenizer.save_pretrained(tmp_path)
    grown = load_backbone(tmp_path, [f"<a_{code}>" for code in range(99)])
    again = load_backbone(tmp_path, [f"<a_{code}>" for code in range(99)])
    assert same(weights(grown), weights(again))
    ids = grown.tokenizer.convert_tokens_to_ids([f"<a_{code}>" for code in range(99)])
    rows = grown.model.get_input_embeddings().weight.detach()
    known = rows[: ids[0]]
    assert torch.equal(known, backbone.model.get_input_embeddings().weight.detach()[: ids[0]])
    new = rows[ids]
    assert len({tuple(row.tolist()) for row in new}) == 99
    away = (new - known.mean(0)).norm(dim=1)
    assert away.max() < 0.5 * (known - known.mean(0)).norm(dim=1).mean()


def test_mid_training_without_semantic_ids_is_refused_at_once(toy_config: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match="mid_training_epochs: mid-training teaches semantic IDs"):
        toy_config(mid_training_epochs=1)
    options = views.mid_training_options(toy_config(mid_training_epochs=2, semantic_ids="kmeans"))
    assert (options.epochs, options.eval_step, options.answer_weight) == (2, 0, 1.0)


def test_tokens_that_are_labels_of_candidates_are_refused(toy_config: Callable[..., Config]) -> None:
    class Clash:
        class sids:
            @staticmethod
            def added_tokens() -> list[str]:
                return ["<c3>", "<d4>"]

    with pytest.raises(ValueError, match="'<c3>' is also the label of a candidate"):
        sid_tokens(toy_config(semantic_ids="own.json", n_candidates=6), Clash)  # type: ignore[arg-type]
    assert sid_tokens(toy_config(n_candidates=2), Clash) == ["<c3>", "<d4>"]  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_with_mid_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"semantic_ids": "kmeans", "sid_codes": 8, "sid_levels": 3, "n_drills": 0}
    keys |= {"stages": ["ar_teacher"], "mid_training_epochs": 1, "mid_training_examples": 50}
    report = run(tmp_path, **keys)
    (folder,) = (path for path in (tmp_path / "saved").iterdir() if path.name.startswith("toy-"))
    assert math.isfinite(report["phases"]["mid_training"])
    backbone, info = load_stage(folder / "mid_training")
    teacher, taught = load_stage(folder / "ar_teacher")
    assert info.data["semantic_ids"] == taught.data["semantic_ids"]
    assert not same(weights(backbone), weights(teacher))
    for tokens in ("<a_0>", "<b_0>"):
        assert len(teacher.tokenizer.encode(tokens, add_special_tokens=False)) == 1
    before = (folder / "mid_training" / "model.safetensors").stat().st_mtime_ns
    run(tmp_path, **keys)
    assert (folder / "mid_training" / "model.safetensors").stat().st_mtime_ns == before
