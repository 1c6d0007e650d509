"""Ragged layouts and their scores, shared by tests of the block-diffusion contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec, Layout, block_index, build_layout
from recbole_dgr2.model.forward import TokenScorer
from tests.tiny import MASK_ID, padded, random_tokens

SIZE = 4
PROMPTS, RESPONSES = [5, 9, 3], [12, 8, 12]
Case = dict[str, Any]


def ragged_case(copies: int = 2, seed: int = 0, anchor: list[int] | None = None) -> Case:
    """Keyword arguments of build_layout but the spec: ragged prompts and responses, random masks."""
    prompt, prompt_length = padded(random_tokens(PROMPTS, seed=seed))
    response, response_length = padded(random_tokens(RESPONSES, seed=seed + 1))
    anchors = torch.tensor(anchor or [0] * len(PROMPTS))
    _, is_slot0 = block_index(response.shape[1], SIZE, anchors)
    draw = torch.rand(
        *prompt.shape[:1], copies, response.shape[1], generator=torch.Generator().manual_seed(seed)
    )
    return {
        "prompt": prompt,
        "prompt_length": prompt_length,
        "response": response,
        "response_length": response_length,
        "masked": (draw < 0.6) & ~is_slot0[:, None],
        "anchor": anchors,
    }


def small_spec(context: Any = "causal") -> BlockDiffusionSpec:
    """Blocks of SIZE, mask id MASK_ID."""
    return BlockDiffusionSpec(SIZE, MASK_ID, context)


def lay_out(
    prompt: Tensor, prompt_length: Tensor, response: Tensor, response_length: Tensor, **rest: Any
) -> Layout:
    """build_layout of a case; rest: spec, masked, anchor."""
    return build_layout((prompt, prompt_length), (response, response_length), **rest)


@torch.no_grad()
def scored(model: PreTrainedModel, layout: Layout, source: Tensor) -> Tensor:
    """float32 [*source.shape, V] scored by TokenScorer; source: int64 [B, ...] into T."""
    rows = torch.arange(len(source)).view(-1, *[1] * (source.dim() - 1)).expand_as(source)
    flat = TokenScorer(model)(layout.ids, layout.positions, layout.allowed, rows.flatten(), source.flatten())
    return flat.view(*source.shape, -1)
