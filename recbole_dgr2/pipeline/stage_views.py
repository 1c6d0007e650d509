"""Frozen views of a Config, continued: the stages that learn from their own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recbole_dgr2.pipeline.views import fill, noise_options, training_options

if TYPE_CHECKING:
    from recbole_dgr2.config import Config
    from recbole_dgr2.decode.types import DecodeOptions
    from recbole_dgr2.trainer.distillation import DistillationOptions
    from recbole_dgr2.trainer.graded import PolicyOptions
    from recbole_dgr2.trainer.options import StageOptions

TEACHER_RL = "ar_teacher_rl"


def rollout_options(config: Config, stage: str) -> DecodeOptions:
    """How a stage's answers are decoded: a student's in blocks whatever decode_mode is, and sampled."""
    from recbole_dgr2.decode.types import DecodeOptions

    autoregressive = stage == TEACHER_RL
    return DecodeOptions(
        mode="autoregressive" if autoregressive else "block",
        max_new_tokens=config["max_new_tokens"],
        batch_size=config["decode_batch_size"],
        tau=config["tau"],
        block_size=None if autoregressive else config["block_size"],
        temperature=config[f"{stage}_temperature"],
        seed=config["seed"],
    )


def policy_stage_options(config: Config, stage: str) -> StageOptions:
    """Training options of a reinforcement-learning stage; an epoch is an iteration, and traces that are rehearsed
    weigh as in the conversion."""
    from recbole_dgr2.trainer.options import StageOptions

    return fill(
        StageOptions,
        config,
        prefix=f"{stage}_",
        epochs=config[f"{stage}_iterations"],
        reasoning_weight=config["conversion_reasoning_weight"],
        answer_weight=config["conversion_answer_weight"],
        lr_schedule="constant",
        **training_options(config),
    )


def policy_options(config: Config, stage: str) -> PolicyOptions:
    """How the policy of a reinforcement-learning stage learns."""
    from recbole_dgr2.trainer.graded import PolicyOptions
    from recbole_dgr2.trainer.rollouts import Sampling

    sampling = Sampling(
        groups=config[f"{stage}_groups"],
        samples=config[f"{stage}_group_size"],
        max_draws=config[f"{stage}_max_draws"],
    )
    return fill(PolicyOptions, config, prefix=f"{stage}_", sampling=sampling)


def distillation_teacher(config: Config) -> str:
    """The stage that distillation learns from: "conversion", or "ar_teacher" for what the conversion grew out of.

    Raises:
        ValueError: conversion in context "block", whose clean stream is not autoregressive.
    """
    teacher = str(config["distillation_teacher"])
    if teacher == "conversion" and config["context"] != "causal":
        raise ValueError(
            f"distillation_teacher conversion: with context {config['context']} its clean stream sees the block ahead, "
            "so it cannot score answers token by token; set distillation_teacher ar_teacher"
        )
    return teacher


def distillation_options(config: Config) -> DistillationOptions:
    """What the student is taught on its own answers."""
    from recbole_dgr2.trainer.distillation import DistillationOptions

    return fill(DistillationOptions, config, prefix="distillation_", noise=noise_options(config))
