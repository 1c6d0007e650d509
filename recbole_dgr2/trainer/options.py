"""What every training stage can be told, and the learning rate over time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

# options that change where and how fast a run goes, not what it computes
_NOT_IN_FINGERPRINT = ("save_step", "progress", "gradient_checkpointing")


@dataclass(frozen=True)
class StageOptions:
    """Options of one stage; the names are RecBole's where RecBole has the option.

    Args:
        epochs: passes over the training examples, >= 0; 0 saves the starting weights as the stage.
        learning_rate: peak learning rate, > 0.
        train_batch_size: examples an optimizer step, over all processes, >= 1.
        warmup_ratio: share of all steps in which the rate rises linearly from 0, in [0, 1).
        weight_decay: AdamW decay of matrices (never of norms, biases or embeddings), >= 0.
        clip_grad_norm: largest gradient norm, > 0.
        eval_step: epochs between validations, 0 = never (then the last weights are kept instead of the best).
        stopping_step: validations without a lower loss that are tolerated before training stops, >= 0.
        reasoning_weight: weight of a reasoning token in the loss, >= 0.
        answer_weight: weight of an answer token in the loss, > 0.
        save_step: optimizer steps between resumable states, 0 = once an epoch.
        seed: seed of batch order and noise, >= 0.
        micro_batch_size: examples a forward pass of one process; 0 = 8 on a CPU, whose caches then hold the
            activations (a sixth faster than 32), and the whole batch elsewhere. The loss is the same.
        optimizer: "adamw", or "muon" for the hidden matrices, which teaches a small model from scratch in fewer steps.
        lr_schedule: how the rate falls to 0 after the warm-up; "constant": it does not.
        mixed_precision: "no" (float32) or "bf16" (autocast; faster on some machines, not the same numbers).
        gradient_checkpointing: keep no activations inside a layer and compute them again in the backward pass: a
            third more time for a fraction of the memory, and the same gradients.
        progress: show a progress bar, where the log goes to a terminal.

    Raises:
        ValueError: an option outside its range.
    """

    epochs: int
    learning_rate: float
    train_batch_size: int
    warmup_ratio: float
    weight_decay: float
    clip_grad_norm: float
    eval_step: int
    stopping_step: int
    reasoning_weight: float
    answer_weight: float
    save_step: int
    seed: int
    micro_batch_size: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    mixed_precision: Literal["no", "bf16"] = "no"
    gradient_checkpointing: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "eval_step", "stopping_step", "save_step", "seed", "micro_batch_size"):
            _require(self, name, getattr(self, name) >= 0, ">= 0")
        for name in ("weight_decay", "reasoning_weight"):
            _require(self, name, 0 <= getattr(self, name) < math.inf, "a finite number >= 0")
        for name in ("learning_rate", "clip_grad_norm", "answer_weight"):
            _require(self, name, 0 < getattr(self, name) < math.inf, "a finite number > 0")
        _require(self, "train_batch_size", self.train_batch_size >= 1, ">= 1")
        _require(self, "warmup_ratio", 0 <= self.warmup_ratio < 1, "in [0, 1)")
        _require(self, "optimizer", self.optimizer in ("adamw", "muon"), "adamw or muon")
        schedules = ("cosine", "linear", "constant")
        _require(self, "lr_schedule", self.lr_schedule in schedules, "cosine, linear or constant")
        _require(self, "mixed_precision", self.mixed_precision in ("no", "bf16"), "no or bf16")

    def fingerprint_fields(self) -> dict[str, Any]:
        """Returns the options that decide what a run computes."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_IN_FINGERPRINT}


def _require(options: StageOptions, name: str, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}={getattr(options, name)!r}: expected {expected}")


def learning_rate_at(step: int, total: int, options: StageOptions) -> float:
    """Returns the learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up over the first `ceil(warmup_ratio * total)` steps, the first of which is not zero; then a
    cosine or a line that would reach zero at step `total`, so that the last step still learns; or constant.
    """
    warmup = math.ceil(options.warmup_ratio * total)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    if options.lr_schedule == "constant":
        return options.learning_rate
    done = (step - warmup) / max(1, total - warmup)
    left = 1 - done if options.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return options.learning_rate * left
