"""Supervised scoring: one forward pass, the LM head at scored slots only, any number of weighted terms.

Logits of all M scored slots are never there together: see `TokenScorer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recbole_dgr2.model.block_diffusion import Layout


@dataclass(frozen=True)
class Scored:
    """A batch ready for its forward pass.

    Args:
        layout: ids, positions and mask.
        rows: batch row of every scored slot, int64 [M].
        cols: its index into the layout's T, int64 [M].
        targets: the token to predict there, int64 [M].
        terms: weight of every scored slot in every loss term, float32 [M] each.
    """

    layout: Layout
    rows: Tensor
    cols: Tensor
    targets: Tensor
    terms: dict[str, Tensor]

    @property
    def weights(self) -> dict[str, float]:
        """Sum of weights a term, and under `<term>_accuracy` the number of its slots that weigh anything."""
        sums = {name: float(weight.sum(dtype=torch.float64)) for name, weight in self.terms.items()}
        counts = {f"{name}_accuracy": float((weight > 0).sum()) for name, weight in self.terms.items()}
        return sums | counts

    def to(self, device: torch.device) -> Scored:
        """Returns the same batch on `device`."""
        moved = {name: tensor.to(device) for name, tensor in vars(self.layout).items()}
        layout = replace(self.layout, **moved)
        terms = {name: weight.to(device) for name, weight in self.terms.items()}
        return Scored(layout, self.rows.to(device), self.cols.to(device), self.targets.to(device), terms)


def score_slots(model: nn.Module, scored: Scored, mask_id: int | None) -> dict[str, Tensor]:
    """Returns, a term, the weighted sum of negative log-likelihoods (differentiable) and the number of right
    tokens.

    Args:
        model: a `TokenScorer`, wrapped or not.
        scored: the batch.
        mask_id: token that can never be predicted (its logit is minus infinity), None where there is none.
    """
    layout = scored.layout

    def read(logits: Tensor, start: int) -> Tensor:
        targets = scored.targets[start : start + len(logits)]
        if mask_id is not None:
            logits[:, mask_id] = -torch.inf
        right = logits.detach().argmax(1) == targets
        return torch.stack([cross_entropy(logits, targets, reduction="none"), right.float()], dim=1)

    values = model(layout.ids, layout.positions, layout.allowed, scored.rows, scored.cols, read)
    losses, right = values[:, 0], values[:, 1].detach() > 0
    sums: dict[str, Tensor] = {}
    for name, weight in scored.terms.items():
        sums[name] = (weight * losses).sum()
        sums[f"{name}_accuracy"] = (right & (weight > 0)).sum()
    return sums
