"""Reinforcement learning of the autoregressive teacher, after its supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.policy_gradient import PolicyGradient, PolicyOptions, Practice
from recbole_dgr2.trainer.rollouts import Roller


class TeacherRL(PolicyGradient):
    """DAPO (arXiv 2503.14476) on autoregressive rollouts: every token is scored in the clean stream, no copy is laid
    out. The clip is wider above (e_high .28) than below (.2), so that rare tokens can rise.

    Args:
        roller, options, info_data, practice, own: see `PolicyGradient`.

    Raises:
        ValueError: a roller that does not decode autoregressively.
    """

    name = "ar_teacher_rl"
    parent = "ar_teacher"

    def __init__(
        self,
        roller: Roller,
        options: StageOptions,
        info_data: Mapping[str, Any],
        practice: Practice,
        own: PolicyOptions,
    ) -> None:
        if roller.options.mode != "autoregressive":
            raise ValueError(
                f"stage {self.name}: rollouts of mode {roller.options.mode!r}, expected 'autoregressive'"
            )
        super().__init__(roller, options, info_data, practice, own)
