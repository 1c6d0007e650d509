"""What a policy learns from: rollouts with their advantages, as examples and as batches; and how it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recbole_dgr2.data.examples import Example
from recbole_dgr2.model.replay import Replay, Trajectory
from recbole_dgr2.trainer.rollouts import Judge, Sampling


@dataclass(frozen=True)
class PolicyOptions:
    """How a policy learns.

    sampling: how groups are drawn. clip_low, clip_high: e_low in (0, 1) and e_high > 0. ar_weight: weight of the
    cross-entropy of supervised examples in the clean stream, >= 0; it keeps autoregressive decoding, by which drafts
    are verified, what it was. max_copies: most noisy copies in a forward, >= 1: bounds memory, changes nothing else.
    """

    sampling: Sampling
    clip_low: float
    clip_high: float
    ar_weight: float = 0.0
    max_copies: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not 0 < self.clip_high < float("inf"):
            raise ValueError(
                f"clip_low={self.clip_low!r}, clip_high={self.clip_high!r}: expected (0, 1), (0, inf)"
            )
        if not 0 <= self.ar_weight < float("inf"):
            raise ValueError(f"ar_weight={self.ar_weight!r}: expected a finite number >= 0")
        if self.max_copies < 1:
            raise ValueError(f"max_copies={self.max_copies!r}: expected an integer >= 1")


@dataclass(frozen=True)
class Practice:
    """What a policy practises on: the judge of its answers (its `repr` must say all that decides a reward), and the
    supervised examples that it rehearses where `ar_weight` is above 0."""

    judge: Judge
    lessons: Sequence[Example] = ()


@dataclass(frozen=True)
class Graded:
    """One rollout to learn from; old_log_probs: replayed before the iteration's first update, one a slot, 0 where the
    slot does not count."""

    trajectory: Trajectory
    advantage: float
    old_log_probs: tuple[float, ...]

    @property
    def key(self) -> int:
        """Of the trajectory."""
        return self.trajectory.key


@dataclass(frozen=True)
class Replayed:
    """Counted slots of a replay; old log-probabilities and advantages, float64 [M]."""

    replay: Replay
    old: Tensor
    advantages: Tensor

    @property
    def weights(self) -> dict[str, float]:
        """The number of slots, for the term `policy` and for the metrics `clipped` and `entropy`."""
        return dict.fromkeys(("policy", "clipped", "entropy"), float(len(self.old)))

    def to(self, device: torch.device) -> Replayed:
        """The same on `device`."""
        # not every device has float64
        return Replayed(
            self.replay.to(device), self.old.float().to(device), self.advantages.float().to(device)
        )
