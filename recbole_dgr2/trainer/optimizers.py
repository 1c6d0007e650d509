"""The optimizers of a stage, driven as one: AdamW for everything, or Muon for the hidden matrices beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.placement import placed_as

Group = dict[str, Any]


class Optimizers:
    """Several torch optimizers that step together; the interface of one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)

    def prepare(self, accelerator: Accelerator) -> None:
        """Hand each optimizer to accelerate."""
        self.parts = [accelerator.prepare(part) for part in self.parts]

    @property
    def param_groups(self) -> list[Group]:
        """Groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """One step of each part."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """States of the parts, tensors and plain values only."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; of sharded weights it takes whole states."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            weights = [weight for group in part.param_groups for weight in group["params"]]
            part.load_state_dict({**own, "state": _as_weights(own["state"], weights)})


def _as_weights(
    states: dict[int, dict[str, Tensor]], weights: Sequence[Tensor]
) -> dict[int, dict[str, Tensor]]:
    """States of the size of their weight, sharded as it is; step counts as they are."""
    return {
        index: {
            name: placed_as(value, weights[index]) if value.shape == weights[index].shape else value
            for name, value in state.items()
        }
        for index, state in states.items()
    }


def build_optimizers(modules: Iterable[nn.Module], options: StageOptions) -> Optimizers:
    """The optimizers that `options.optimizer` names, for all trainable weights of `modules`.

    "muon" (Jordan et al. 2024; torch 2.9 and later) orthogonalises the updates of the hidden matrices and scales them
    to AdamW's size, so that one learning rate serves both; embeddings, norms and biases stay with AdamW.

    Raises:
        ValueError: this torch has no Muon, or it would get parts of matrices.
    """
    decaying, others = parameter_groups(modules, options.weight_decay)
    rate = options.learning_rate
    if options.optimizer == "adamw":
        return Optimizers([torch.optim.AdamW([decaying, others], lr=rate, fused=True)])
    if any(isinstance(matrix, DTensor) for matrix in decaying["params"]):
        raise ValueError(
            f"optimizer {options.optimizer}: needs whole matrices, which FSDP shards over processes; expected adamw"
        )
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"optimizer muon: torch {torch.__version__} has none, expected 2.9 or later; use adamw"
        )
    muon = torch.optim.Muon(
        decaying["params"], lr=rate, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Optimizers([muon, torch.optim.AdamW([others], lr=rate, fused=True)])


def parameter_groups(modules: Iterable[nn.Module], weight_decay: float) -> list[Group]:
    """Splits trainable weights into hidden matrices, which decay, and the rest, which never does.

    Norm weights and biases (fewer than two dimensions) and embeddings do not decay, nor do single rows of embedding and
    head that are trained beside adapters (the one nn.ParameterDict of those); an output head tied to the embedding is
    the embedding. Every weight comes once.

    Args:
        modules: all modules of a model, as `model.modules()` gives them.
        weight_decay: decay of the first group.
    """
    decay: dict[int, nn.Parameter] = {}
    keep: dict[int, nn.Parameter] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                exempt = isinstance(module, (nn.Embedding, nn.ParameterDict)) or parameter.ndim < 2
                (keep if exempt else decay)[id(parameter)] = parameter
    matrices = [parameter for key, parameter in decay.items() if key not in keep]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": list(keep.values()), "weight_decay": 0.0},
    ]
