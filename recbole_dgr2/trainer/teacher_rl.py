"""Reinforcement learning of the autoregressive teacher, after its supervised fine-tuning."""

from __future__ import annotations

from recbole_dgr2.trainer.policy_gradient import PolicyGradient


class TeacherRL(PolicyGradient):
    """DAPO (arXiv 2503.14476) on autoregressive rollouts: every token is scored in the clean stream, no copy is laid
    out. The clip is wider above (e_high .28) than below (.2), so that rare tokens can rise.

    Arguments and errors: see `PolicyGradient`.
    """

    name = "ar_teacher_rl"
    parent = "ar_teacher"
    mode = "autoregressive"
