"""The teacher's loss against a plain forward of the stock model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recbole_dgr2.data.examples import Batch, Example, collate
from recbole_dgr2.trainer import ARTeacher
from tests.tiny import ARCHITECTURES, tiny_backbone
from tests.training import OPTIONS, TRAIN


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_is_the_weighted_mean_over_response_tokens(architecture: str) -> None:
    stage = ARTeacher(tiny_backbone(architecture), OPTIONS, {})
    top = bottom = right = 0.0
    for example in TRAIN[:3]:
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        with torch.no_grad():
            log_probs = stage.backbone.model(ids).logits[0].log_softmax(-1)
        for slot, token in enumerate(example.response_ids):
            weight = 1.0 if slot >= example.answer_start else 0.5
            at = log_probs[len(example.prompt_ids) + slot - 1]
            top, bottom = top - weight * float(at[token]), bottom + weight
            right += float(at.argmax() == token)
    loss, means = stage.loss(collate(TRAIN[:3], 0), [])
    assert float(loss.detach()) == pytest.approx(top / bottom, rel=1e-5)
    assert means["nll"] == pytest.approx(top / bottom, rel=1e-5)
    assert means["nll_accuracy"] == pytest.approx(right / sum(len(e.response_ids) for e in TRAIN[:3]))


def test_padding_changes_nothing() -> None:
    stage = ARTeacher(tiny_backbone(), OPTIONS, {})
    batch = collate(TRAIN[:4], 0)
    wide = Batch(
        keys=batch.keys,
        prompt=torch.nn.functional.pad(batch.prompt, (0, 5), value=9),
        prompt_length=batch.prompt_length,
        response=torch.nn.functional.pad(batch.response, (0, 7), value=1),
        response_length=batch.response_length,
        answer=torch.nn.functional.pad(batch.answer, (0, 7)),
    )
    one, two = (float(stage.loss(each, [])[0].detach()) for each in (batch, wide))
    assert one == pytest.approx(two, rel=1e-6)


def test_reasoning_weight_zero_scores_the_answer_alone() -> None:
    stage = ARTeacher(tiny_backbone(), replace(OPTIONS, reasoning_weight=0.0), {})
    prepared = stage.prepare(collate([Example(1, (3, 4), (5, 6, 7, 1), 2)], 0), [])
    assert prepared.targets.tolist() == [7, 1]
    assert prepared.weights == {"nll": 2.0, "nll_accuracy": 2.0}


def test_learns_a_small_task(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    options = replace(OPTIONS, epochs=40, learning_rate=2e-2, train_batch_size=18, eval_step=0, save_step=0)
    stage = ARTeacher(backbone, options, {})
    stage.fit(TRAIN, [], tmp_path / "stage")
    loss, means = stage.loss(collate(TRAIN, 0), [])
    assert float(loss.detach()) < 0.2 and means["nll_accuracy"] > 0.95
    assert not backbone.model.training
