"""On-policy stages on tiny models: prompts, judges and stages that learn within seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.ranking import Judgement
from recbole_dgr2.decode import DecodeOptions, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, load_stage
from recbole_dgr2.trainer import convert
from recbole_dgr2.trainer.graded import PolicyOptions, Practice
from recbole_dgr2.trainer.policy_gradient import PolicyGradient
from recbole_dgr2.trainer.rollouts import Roller, Sampling
from tests.tiny import random_tokens, tiny_backbone
from tests.training import OPTIONS, DyingOnPolicy, Killed, same, weights

PROMPTS = [Request(100 + i, tuple(row)) for i, row in enumerate(random_tokens([4, 7, 3, 6, 5, 9]))]
LESSONS = tuple(Example(i, (3 + i, 4), (5, 6, 7 + i, 1), 2) for i in range(4))
SAMPLING = Sampling(groups=3, samples=4, max_draws=2)
POLICY = PolicyOptions(SAMPLING, clip_low=0.2, clip_high=0.28, ar_weight=0.1, max_copies=2)
EAGER = replace(
    OPTIONS, epochs=8, train_batch_size=16, eval_step=0, save_step=0, learning_rate=2e-2, warmup_ratio=0.0
)
"""Under these a reward rises within seconds."""


@dataclass(frozen=True)
class Vowels:
    """A dense reward: the share of vowels among the letters of an answer."""

    factor: float = 1.0

    def __call__(self, key: int, text: str, finished: bool) -> Judgement:
        letters = [letter for letter in text if letter.isalpha()]
        share = sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)
        return Judgement(self.factor * share, True, False)


@dataclass(frozen=True)
class Invalid:
    """Nothing is ever valid."""

    def __call__(self, key: int, text: str, finished: bool) -> Judgement:
        return Judgement(-1.0, False, False)


def decoding(mode: str = "block", **changes: Any) -> DecodeOptions:
    options = DecodeOptions(
        mode,  # type: ignore[arg-type]
        max_new_tokens=10,
        batch_size=8,
        tau=0.02 if mode == "block" else 0.9,
        temperature=1.0,
        seed=7,
    )
    return replace(options, **changes)


def converted(architecture: str = "qwen3", context: Any = "causal") -> tuple[Backbone, BlockDiffusionSpec]:
    return convert(tiny_backbone(architecture), 4, context)


def roller(mode: str = "block", **changes: Any) -> Roller:
    if mode == "autoregressive":
        return Roller(tiny_backbone(), None, decoding(mode, **changes))
    return Roller(*converted(), decoding(mode, **changes))


def make(
    kind: type[PolicyGradient],
    mode: str,
    judge: Any = None,
    own: PolicyOptions = POLICY,
    **changes: Any,
) -> Any:
    options = replace(OPTIONS, **{"epochs": 2, "save_step": 1, "train_batch_size": 4, **changes})
    return kind(roller(mode), options, {"n": 10}, Practice(judge or Vowels(), LESSONS), own)


def mortal(kind: type[PolicyGradient]) -> type[PolicyGradient]:
    """The stage, dying when it prepares its n-th batch (`lives`) or collects for the n-th time (`draws`)."""
    return type("Mortal", (DyingOnPolicy, kind), {})


def assert_reward_rises(stage: PolicyGradient, folder: Path) -> StageInfo:
    """The mean reward of the rollouts rises from the first iteration to the last; returns what was saved."""
    stage.fit(PROMPTS, [], folder)
    _, info = load_stage(folder)
    rewards = [record["rollout_reward"] for record in info.data["training"]["history"]]
    assert rewards[-1] > rewards[0] + 0.1, rewards
    return info


def assert_resumes(
    kind: type[PolicyGradient], mode: str, death: dict[str, int], collected: list[int], tmp_path: Path
) -> None:
    """A run that dies at `death` and is started again ends as the unbroken one, rolling out `collected` only."""
    valid = PROMPTS[:2] if "draws" in death else []  # without, the last weights are kept, not the best
    unbroken, broken, resumed = (make(mortal(kind), mode) for _ in range(3))
    unbroken.fit(PROMPTS, valid, tmp_path / "unbroken")
    for name, value in death.items():
        setattr(broken, name, value)
    with pytest.raises(Killed):
        broken.fit(PROMPTS, valid, tmp_path / "broken")
    resumed.fit(PROMPTS, valid, tmp_path / "broken")
    assert list(resumed.collected) == collected
    assert same(weights(resumed.backbone), weights(unbroken.backbone))
    assert valid or not same(weights(resumed.backbone), weights(make(kind, mode).backbone))
    found = [(tmp_path / name / "dgr2.json").read_text() for name in ("unbroken", "broken")]
    assert found[0] == found[1]
    assert not (tmp_path / "broken.partial").exists()
