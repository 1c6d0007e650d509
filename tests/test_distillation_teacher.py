"""Who may teach in on-policy distillation: any callable of the student's vocabulary that gives numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.trainer import convert
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.teacher import frozen_teacher
from tests.distilling import (
    L,
    answers,
    stage,
)
from tests.tiny import tiny_backbone


def test_any_callable_may_teach() -> None:
    tested, batch = stage(), answers()
    wanted = tested.loss(batch, generators(0, 0, range(4)))[1]
    scorer = tested.teacher
    tested.teacher = lambda *inputs: scorer(*inputs)  # such as one backbone with its adapter off
    assert tested.loss(batch, generators(0, 0, range(4)))[1] == wanted
    assert tested.settings()["teacher"] is None


def test_a_teacher_without_the_rows_of_the_conversion_is_the_same() -> None:
    tested, batch = stage(), answers()
    wanted = tested.loss(batch, generators(0, 0, range(4)))[1]
    assert isinstance(tested.teacher, TokenScorer)
    tested.teacher.model.resize_token_embeddings(tested.spec.mask_id)
    short = tested.loss(batch, generators(0, 0, range(4)))[1]
    assert short["divergence"] == pytest.approx(
        wanted["divergence"], rel=0.2
    )  # spare rows no longer take mass


def other_tokenizer(backbone: Backbone) -> Backbone:
    from tests.tiny import CORPUS, train_tokenizer

    return Backbone(backbone.model, train_tokenizer(CORPUS, 300, ("<c1>",)))


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    student, spec = convert(tiny_backbone(), L)
    with pytest.raises(
        ValueError, match=r"teacher: its tokenizer has .*expected the parent.*ar_teacher"
    ) as caught:
        frozen_teacher(other_tokenizer(tiny_backbone()), student, spec)
    assert "\n" not in str(caught.value)
    big = tiny_backbone()
    big.model.resize_token_embeddings(student.rows + 64)
    with pytest.raises(ValueError, match=rf"teacher: {student.rows + 64} embedding rows, the student has"):
        frozen_teacher(big, student, spec)
    tested = stage()
    tested.teacher = lambda ids, positions, allowed, rows, cols: torch.zeros(len(rows), 17)
    with pytest.raises(ValueError, match="teacher: 17 embedding rows"):
        tested.loss(answers(), generators(0, 0, range(4)))


def test_a_teacher_that_gives_no_number_is_an_error_that_names_the_list() -> None:
    tested = stage()
    scorer = tested.teacher

    def broken(*inputs: Tensor) -> Tensor:
        logits = scorer(*inputs)
        logits[int((inputs[3] == 2).nonzero()[1]), 4] = math.nan
        return logits

    tested.teacher = broken
    with pytest.raises(FloatingPointError, match="NaN for list 52") as caught:
        tested.loss(answers(), generators(0, 0, range(4)))
    assert "\n" not in str(caught.value)
