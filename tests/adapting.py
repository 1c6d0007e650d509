"""Tiny backbones under an adapter: fresh, stirred as if trained, and over a finished teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from recbole_dgr2.model.adapters import Adapted, AdapterOptions, Base, adapt
from recbole_dgr2.model.backbone import Backbone, start_mask_row
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, save_stage
from recbole_dgr2.trainer import convert
from tests.tiny import ARCHITECTURES, random_tokens, tiny_backbone, tiny_model, tiny_tokenizer

IDS = [310, 311, 319]
SIZE = AdapterOptions(rank=2, alpha=4.0)
BASE = Base("nowhere", "0", "float32", 384)
TEACHER = StageInfo("ar_teacher", None, None)
INPUT = torch.tensor(random_tokens([12, 12], high=320))
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def plain(architecture: str = "qwen3", tied: bool = True) -> Backbone:
    if tied:
        return tiny_backbone(architecture)
    return Backbone(tiny_model(architecture, vocab_size=384), tiny_tokenizer())


def stir(backbone: Backbone) -> None:
    """As if it had been trained: no adapter weight is what it was."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(backbone: Backbone, ids: Tensor = INPUT) -> Tensor:
    return backbone.model(ids).logits


def converted(folder: Path, architecture: str = "qwen3") -> tuple[Adapted, BlockDiffusionSpec]:
    """A finished teacher in `folder`, converted and under a fresh adapter."""
    backbone, spec = convert(tiny_backbone(architecture), 4)
    if not folder.exists():
        save_stage(folder, backbone, TEACHER)
    start_mask_row(backbone, spec.mask_id)
    return adapt(backbone, SIZE, Base.of(folder, backbone), [*range(310, 321)], seed=0), spec
