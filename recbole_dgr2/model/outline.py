"""The size of a language model and of its activations, from its config alone: nothing is loaded or computed.

A forward pass is traced on fake tensors, which have shapes and types but no memory, and what autograd would keep for
the backward pass is added up. Attention is traced as the fused kernels keep it (queries, keys, values, output, one
number a query, and the mask as floating-point numbers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from recbole_dgr2.model.backbone import EmbeddedSpec, build_embedded
from recbole_dgr2.model.support import require_folder

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Outline:
    """Sizes of a causal LM; `cached`: numbers that a token's keys and values take, all layers together.

    matrices: parameters of hidden matrices (what the optimizer muon takes). linears: last name, inputs and outputs of
    every linear layer but the head. build: the model with that many layers, on fake tensors.
    """

    parameters: int
    matrices: int
    rows: int
    layers: int
    hidden: int
    cached: int
    linears: tuple[tuple[str, int, int], ...]
    build: Callable[[int], Any]

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of LoRA adapters; no `targets`: on all linear layers."""
        return sum(rank * (i + o) for name, i, o in self.linears if not targets or name in targets)


def outline_of(source: str) -> Outline:
    """Of a folder or hub name; only its config.json is read. ValueError, one line, where there is none."""
    require_folder(source)
    try:
        config = AutoConfig.from_pretrained(str(Path(source).expanduser()), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"backbone {source!r}: its config cannot be read: {reason}") from error

    def build(layers: int) -> Any:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1] * layers
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)

    return _outlined(build, config.num_hidden_layers)


def embedded_outline(spec: EmbeddedSpec) -> Outline:
    """Of the model that is built here, with a tokenizer of `spec.vocab_size` tokens."""

    class Tokens:
        eos_token_id, pad_token_id = 1, 0

        def __len__(self) -> int:
            return spec.vocab_size

    def build(layers: int) -> Any:
        values = {**vars(spec), "num_layers": layers}
        return build_embedded(EmbeddedSpec(**values), Tokens(), 0).model  # type: ignore[arg-type]

    return _outlined(build, spec.num_layers)


def _outlined(build: Callable[[int], Any], layers: int) -> Outline:
    with FakeTensorMode():
        model = build(1)
    config, embedding, head = model.config, model.get_input_embeddings(), model.get_output_embeddings()
    outside = sum({id(each.weight): each.weight.numel() for each in (embedding, head)}.values())
    layer = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
    total = sum(p.numel() for p in model.parameters())
    linears = [
        (name.rpartition(".")[2], each.in_features, each.out_features)
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each is not head
    ]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tied = head.weight is embedding.weight
    return Outline(
        parameters=total + (layers - 1) * layer,
        matrices=layers * sum(i * o for _, i, o in linears) + (0 if tied else outside // 2),
        rows=int(embedding.num_embeddings),
        layers=layers,
        hidden=int(config.hidden_size),
        cached=2 * layers * config.num_key_value_heads * width,
        linears=tuple(linears) * layers,
        build=build,
    )


def activations(outline: Outline, batch: int, tokens: int, bf16: bool, recompute: bool) -> int:
    """Bytes that the forward pass of `batch` rows of `tokens` keeps for the backward pass, logits not counted.

    `recompute`: layers keep their input alone; what one of them keeps while it is computed again is counted once.
    """
    first, second = (_saved(outline.build, layers, (batch, tokens), bf16) for layers in (1, 2))
    layer = second - first
    if recompute:
        return first + (outline.layers - 1) * batch * tokens * outline.hidden * FLOAT
    return first + (outline.layers - 1) * layer


def _saved(build: Callable[[int], Any], layers: int, shape: tuple[int, int], bf16: bool) -> int:
    with FakeTensorMode():
        model = build(layers).train()
        own = {_identity(p) for p in model.parameters()}
        sizes: dict[int, int] = {}
        kept: list[Tensor] = []  # an identity is used again once its storage is gone

        def pack(tensor: Tensor) -> Tensor:
            if _identity(tensor) not in own:
                sizes[_identity(tensor)] = tensor.untyped_storage().nbytes()
                kept.append(tensor)
            return tensor

        ids = torch.zeros(shape, dtype=torch.long)
        mask = torch.ones(shape[0], 1, shape[1], shape[1], dtype=torch.bool)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
        with _fused_attention(), saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    return sum(sizes.values())


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Attention(torch.autograd.Function):
    """What a fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask.to(query.dtype), out, sums)
        return out


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        return _Attention.apply(query, key, value, attn_mask)

    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original
