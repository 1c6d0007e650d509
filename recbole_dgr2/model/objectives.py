"""The policy-gradient objective on replayed log-probabilities: pure functions in float32.

Sources: group advantages of GRPO (arXiv 2402.03300); DAPO (arXiv 2503.14476) for dropped groups without variance,
clip-higher and the sum over tokens; Diffusion-GR2 (arXiv 2607.01170, Eq. 4).
n groups of G samples; M scored slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_signal(rewards: Tensor) -> Tensor:
    """bool [n]: groups whose rewards, float [n, G], are not all equal; the others teach nothing."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def group_advantages(rewards: Tensor) -> Tensor:
    """float64 [n, G]: (R - mean) / std within each group of rewards, float [n, G]; 0 in a group without variance.

    std is that of the group itself (divided by G, not G - 1).
    """
    rewards = rewards.double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.std(dim=1, correction=0, keepdim=True)
    return torch.where(has_signal(rewards)[:, None], centred / spread, torch.zeros_like(centred))


def clipped_objective(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """min(rho * A, clip(rho, 1 - e_low, 1 + e_high) * A) of each slot, float [M], and where the clip holds, bool [M].

    rho = exp(log_probs - old_log_probs), differentiable in log_probs [M]; advantages: [M]. A slot is clipped where the
    minimum has no gradient: rho above 1 + e_high with A > 0, or below 1 - e_low with A < 0. DAPO sums the slots of
    all responses and divides by their number. ValueError: clip_low outside (0, 1) or clip_high not above 0.
    """
    if not 0.0 < clip_low < 1.0 or not 0.0 < clip_high < float("inf"):
        raise ValueError(f"clip_low={clip_low!r}, clip_high={clip_high!r}: expected (0, 1) and (0, inf)")
    advantages = advantages.to(log_probs.dtype)
    ratio = (log_probs - old_log_probs.to(log_probs.dtype)).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
    return torch.minimum(ratio * advantages, bounded * advantages), clipped.detach()
