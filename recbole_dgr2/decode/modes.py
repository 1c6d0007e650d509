"""From options to the policy of a mode, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recbole_dgr2.decode.autoregressive import Autoregressive
from recbole_dgr2.decode.block import Block
from recbole_dgr2.decode.policy import Policy
from recbole_dgr2.decode.speculative import Speculative
from recbole_dgr2.decode.types import DecodeOptions, Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec


def policy_of(options: DecodeOptions, eos_id: int, spec: BlockDiffusionSpec | None) -> Policy:
    """The policy of a fixed mode; ValueError where the model was not converted for it."""
    if options.mode == "autoregressive":
        return Autoregressive(options, eos_id, spec.mask_id if spec else None)
    if spec is None:
        raise ValueError(
            f"mode {options.mode!r} needs a model converted to block diffusion: run the conversion stage first"
        )
    block_size = options.block_size or spec.block_size
    if block_size > spec.block_size:
        raise ValueError(
            f"block_size {block_size} is above the trained block size, at most {spec.block_size}"
        )
    if options.mode == "block":
        return Block(options, eos_id, spec.mask_id, block_size, spec.context == "causal")
    if spec.context != "causal":
        raise ValueError(
            f"mode 'speculative' needs a model converted with context 'causal', got {spec.context!r}: its blocks "
            "may begin anywhere"
        )
    return Speculative(options, eos_id, spec.mask_id, block_size)


def check_requests(
    model: torch.nn.Module,
    requests: Sequence[Request],
    options: DecodeOptions,
    spec: BlockDiffusionSpec | None,
) -> None:
    """Refuse (ValueError) what the model cannot decode; the request and the limit are named."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if spec is not None and spec.mask_id >= vocabulary:
        raise ValueError(f"mask_id {spec.mask_id} is outside the model's {vocabulary} embedding rows")
    positions = getattr(model.config, "max_position_embeddings", None)
    for request in requests:
        length = len(request.prompt_ids)
        if not length:
            raise ValueError(f"request {request.key}: the prompt is empty, at least one token is needed")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise ValueError(
                f"request {request.key}: a prompt token is outside the vocabulary of {vocabulary} rows"
            )
        if positions is not None and length + options.max_new_tokens > positions:
            raise ValueError(
                f"request {request.key}: {length} prompt tokens and {options.max_new_tokens} new ones exceed the "
                f"model's {positions} positions; shorten the prompt to {max(positions - options.max_new_tokens, 0)}"
            )
