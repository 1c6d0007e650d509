"""Where the weights of a stage are while it is trained: whole in every process, or sharded over the processes.

Sharded (FSDP2, Zhao et al. 2023, arXiv 2304.11277; torch's `fully_shard`), each process keeps 1 / world of every
weight, gradient and optimizer state, and layers are gathered one by one as a pass reaches them. All processes must
then make the same number of passes. Decoding cannot: answers differ in length. So a stage's own model stays beside
the sharded one, is whole while it decodes and when training is over, and holds nothing in between.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from recbole_dgr2.system import processes


class Whole:
    """Every process holds all weights of the scorer; gradients are averaged where there are several.

    scorer: has the weights that are trained. model: what is called in training.
    """

    def __init__(self, scorer: nn.Module, accelerator: Accelerator) -> None:
        self.scorer, self.accelerator = scorer, accelerator
        self.model = accelerator.prepare(scorer)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside, the stage's own model has the present weights, and any process may call it at any time."""
        yield

    def finish(self) -> None:
        """The stage's own model has the present weights from now on."""

    def leave(self) -> None:
        """Undo what accelerate put around the forward of the module, whether training succeeded or not."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)


class Sharded:
    """Every process holds its part of every weight; see `Whole` for what is offered.

    Args:
        scorer: the stage's own, the same in all processes; emptied, but for `keep`.
        accelerator: device.
        keep: never empty it, since it is called in training too.
    """

    def __init__(self, scorer: nn.Module, accelerator: Accelerator, keep: bool) -> None:
        self.own, self.device, self.keep = scorer, accelerator.device, keep
        # the copy begins with the weights themselves, no second set of them, until its layers are sharded
        self.scorer = copy.deepcopy(scorer, {id(weight): weight for weight in scorer.parameters()})
        self.model = _shard(self.scorer, self.device)
        # a pass without gradients leaves gathered ones in their places, which no later update reaches
        self.parts = dict(self.scorer.named_parameters())
        scorer.to(self.device)
        self._empty()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """See `Whole`; all processes enter together, and the weights are gathered."""
        self.finish()
        yield
        self._empty()

    @torch.no_grad()
    def finish(self) -> None:
        """See `Whole`; all processes call it."""
        own = dict(self.own.named_parameters())
        for name, part in self.parts.items():
            if part.requires_grad or not self.keep:
                own[name].data = whole(part)

    def leave(self) -> None:
        """Nothing was put around the stage's own model."""

    def _empty(self) -> None:
        """Free the weights and keep their shapes; whoever reads them before the next `decoding` finds NaN."""
        if not self.keep:
            for weight in self.own.parameters():
                nothing = torch.full((), torch.nan, dtype=weight.dtype, device=self.device)
                weight.data = nothing.expand(weight.shape)


def place(scorer: nn.Module, accelerator: Accelerator, keep: bool) -> Whole | Sharded:
    """As the launch asks for; keep: see `Sharded`."""
    if processes.sharded():
        return Sharded(scorer, accelerator, keep)
    return Whole(scorer, accelerator)


def _shard(scorer: Any, device: torch.device) -> Any:
    """Shard every layer of the transformer, and all else (embedding, norm, head) as one more, in place."""
    mesh = init_device_mesh(device.type, (processes.world(),))
    kinds = {kind for module in scorer.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
    for module in list(scorer.modules()):
        if type(module).__name__ in kinds:
            fully_shard(module, mesh=mesh)
    return fully_shard(scorer, mesh=mesh)


def whole(value: Tensor) -> Tensor:
    """All of a tensor; of a sharded one every process asks for it together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def placed_as(value: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, the same in all processes, sharded as `model` is; as it is where that is not."""
    if not isinstance(model, DTensor):
        return value
    mesh, placements = model.device_mesh, model.placements
    return distribute_tensor(value.to(model.device), mesh, placements, src_data_rank=None)


def gathered(values: Any) -> Any:
    """Sharded tensors of nested dicts and lists, whole and on the CPU in the main process, empty in the others.

    What is not sharded stays as it is. All processes call it together.
    """
    if isinstance(values, dict):
        return {name: gathered(value) for name, value in values.items()}
    if isinstance(values, list):
        return [gathered(value) for value in values]
    if not isinstance(values, DTensor):
        return values
    found = whole(values.detach())
    return found.cpu() if processes.is_main() else found.new_empty(0)


def no_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to zero, the ones that attention modules keep as a number included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
