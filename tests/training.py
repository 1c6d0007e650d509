"""Supervised stages on tiny models that train within a second, and die where a test wants them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recbole_dgr2.data.examples import Batch, Example
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.trainer import ARTeacher, StageOptions
from recbole_dgr2.trainer.on_policy import Material, OnPolicy
from recbole_dgr2.trainer.scoring import Scored
from recbole_dgr2.trainer.stage import Stage
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


class Dying(Stage[Scored]):
    """Put before a stage's class: it dies when it prepares its n-th training batch."""

    lives = 0

    def prepare(self, batch: Batch, generators: Sequence[torch.Generator]) -> Scored:
        self.lives -= 1
        if self.lives == 0:
            raise Killed
        return super().prepare(batch, generators)  # type: ignore[safe-super]


class DyingOnPolicy(OnPolicy[Any]):
    """The same for stages on policy: it dies when it prepares its n-th batch, or collects for the n-th time."""

    lives = draws = 0
    collected: Sequence[int] = ()

    def parts(self, batch: Any, generators: Sequence[torch.Generator]) -> list[Any]:
        self.lives -= 1
        if self.lives == 0:
            raise Killed
        return super().parts(batch, generators)

    def collect(self, prompts: Sequence[Any], iteration: int) -> Material:
        self.draws -= 1
        if self.draws == 0:
            raise Killed
        self.collected = [*self.collected, iteration]
        return super().collect(prompts, iteration)  # type: ignore[safe-super]


class Mortal(Dying, ARTeacher):
    """The teacher, dying."""


def weights(backbone: Backbone) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def fitted(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    backbone = tiny_backbone()
    ARTeacher(backbone, replace(OPTIONS, **changes), {"n": 10}).fit(TRAIN, VALID, folder)
    return weights(backbone)
