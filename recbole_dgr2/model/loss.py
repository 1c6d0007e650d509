"""Losses on scored logits, pure and in float32. M scored slots, V vocabulary, B rows, R response width."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def token_weights(answer: Tensor, real: Tensor, reasoning_weight: float, answer_weight: float) -> Tensor:
    """float32 [B, R]: `answer_weight` on answer tokens, `reasoning_weight` on other real ones, 0 on padding.

    answer, real: bool [B, R]. Source: Diffusion-GR2 (arXiv 2607.01170), SFT objective with w_r < w_a.
    """
    for name, value in (("reasoning_weight", reasoning_weight), ("answer_weight", answer_weight)):
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value!r}")
    weights = torch.full(answer.shape, float(reasoning_weight), device=answer.device)
    return weights.masked_fill(answer, float(answer_weight)).masked_fill(~real, 0.0)


def weighted_nll(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Scalar float32: sum(w * -log p(target)) / sum(w); 0, with a zero gradient, where no weight is left.

    logits: float [M, V]; targets: int64 [M]; weights: float [M], >= 0.
    """
    nll = functional.cross_entropy(logits.float(), targets, reduction="none")
    weights = weights.to(nll.dtype)
    # where, not a product: an infinite nll of an unweighted slot must not turn the sum into NaN
    total = torch.where(weights > 0, nll * weights, torch.zeros_like(nll)).sum()
    return total / weights.sum().clamp_min(torch.finfo(nll.dtype).tiny)
