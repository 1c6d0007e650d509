"""Reinforcement learning of the student, by exact replay of its block-parallel decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.policy_gradient import PolicyGradient, PolicyOptions, Practice
from recbole_dgr2.trainer.rollouts import Roller


class Reinforcement(PolicyGradient):
    """RL on trajectories of mode "block", decoded with the threshold that is used later.

    A token that pass s of its block committed is scored on the canvas before that pass, a seed in the clean stream.
    Source: Diffusion-GR2 (arXiv 2607.01170), Section 3.6 and Eq. 4.

    Args:
        roller, options, info_data, practice, own: see `PolicyGradient`.
        parent: the stage that the weights come from, "distillation" or "conversion".

    Raises:
        ValueError: a roller that does not decode in blocks, or another parent.
    """

    name = "reinforcement"
    mode = "block"

    def __init__(
        self,
        roller: Roller,
        options: StageOptions,
        info_data: Mapping[str, Any],
        practice: Practice,
        own: PolicyOptions,
        parent: str = "distillation",
    ) -> None:
        if parent not in ("distillation", "conversion"):
            raise ValueError(f"stage {self.name}: parent {parent!r}, expected distillation or conversion")
        super().__init__(roller, options, info_data, practice, own)
        self.parent = parent
