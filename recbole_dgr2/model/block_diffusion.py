"""Block diffusion on top of a causal LM: the layout of a training row, its attention mask, its end.

A row is `[P | C | N1 ... NK]`: prompt, clean response, K noisy copies of the response, with `pos(N) =
pos(C)`. The prompt is not doubled. Blocks are counted from the first response token, so padding never moves
them. P and C are the plain autoregressive model (`context="causal"`); a noisy block is bidirectional inside
itself, sees the prompt and the clean blocks before it, and no other noisy block. The autoregressive shift is
kept: the token of slot k is scored at slot k - 1 of its noisy block; slot 0 of a block is never masked and is
scored by the clean stream at the token before it, exactly as a decoder's commit pass yields the seed of the
next block.

Relatives: BD3-LM (arXiv 2503.09573) for `[clean | noisy]` training, Fast-dLLM v2 (arXiv 2509.26328) for the
kept shift and complementary masks, NBDiff (arXiv 2512.06776) for the causal context.

Symbols: B rows, P prompt width, R response width, K noisy copies, T = P + R + K * R, L block length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recbole_dgr2.model.noise import NoiseOptions, draw_anchors, draw_masks

__all__ = [
    "BlockDiffusionSpec",
    "Context",
    "ExtendedResponse",
    "Layout",
    "NoiseOptions",
    "block_index",
    "build_layout",
    "draw_anchors",
    "draw_masks",
    "extend_to_block",
    "real_slots",
]

Context = Literal["causal", "block"]


@dataclass(frozen=True)
class BlockDiffusionSpec:
    """What must be the same in training and decoding; saved with the weights and checked at every load.

    block_size: L, tokens a block, >= 1. mask_id: embedding row of the mask token, used by no text. context:
    "causal" keeps the clean stream the plain AR model, "block" makes finished blocks bidirectional inside
    (the paper's wording).
    """

    block_size: int
    mask_id: int
    context: Context = "causal"

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("mask_id", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.context not in get_args(Context):
            raise ValueError(f"context must be one of {list(get_args(Context))}, got {self.context!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockDiffusionSpec:
        """Inverse of `to_dict`; a missing or unknown field is a ValueError that names it."""
        names = [f.name for f in fields(cls)]
        wrong = sorted(set(values) ^ set(names))
        if wrong:
            raise ValueError(
                f"block-diffusion spec: fields {wrong} are missing or unknown, expected exactly {names}"
            )
        return cls(**values)

    def check(self, expected: BlockDiffusionSpec) -> None:
        """Refuse (ValueError) when this spec, of a checkpoint, differs from the one asked for."""
        for f in fields(self):
            own, asked = getattr(self, f.name), getattr(expected, f.name)
            if own != asked:
                raise ValueError(
                    f"{f.name}: the checkpoint was converted with {own!r} but {asked!r} is asked for; "
                    f"set {f.name} to {own!r} or run the conversion stage again"
                )


@dataclass(frozen=True)
class Layout:
    """One batch laid out as `[P | C | N1 ... NK]`; K = 0 is plain autoregressive training.

    ids, positions: int64 [B, T]. allowed: bool [B, T, T], True where the query (second axis) may attend the
    key (third). Padded keys are attended by nobody but themselves (so that no query row is empty, which would
    give NaN). source: int64 [B, K, R], where in T slot k of copy c is scored. clean_source: int64 [B, R], the
    AR shift: last prompt token, then C[k - 1]. clean_scorable: bool [B, R], the slots whose clean_source does
    not see the token itself: every real slot in context "causal", slot 0 of each block in context "block"
    (the rest leaks). block_of: int64 [B, R]; is_slot0, real: bool [B, R].
    """

    ids: Tensor
    positions: Tensor
    allowed: Tensor
    source: Tensor
    clean_source: Tensor
    clean_scorable: Tensor
    block_of: Tensor
    is_slot0: Tensor
    real: Tensor


@dataclass(frozen=True)
class ExtendedResponse:
    """A response filled with EOS to the end of the block of its first EOS: the canvas a decoder ends on.

    response: int64 [B, R']. response_length: int64 [B], fill included. fill: bool [B, R'], the slots after
    the first EOS. answer: bool [B, R'], False on fill. Fill slots are ordinary slots of the noisy stream:
    masked like any other, with EOS as their label, so that what a decoder commits after EOS is never out of
    distribution. The clean stream has no label there (`labelled_clean`), since autoregressive decoding stops
    at EOS.
    """

    response: Tensor
    response_length: Tensor
    answer: Tensor
    fill: Tensor

    @property
    def real(self) -> Tensor:
        """bool [B, R']: slots with a label in the noisy stream (up to the end of the fill)."""
        return real_slots(self.response_length, self.response.shape[1])

    @property
    def labelled_clean(self) -> Tensor:
        """bool [B, R']: slots with a label in the clean stream (up to the first EOS)."""
        return self.real & ~self.fill


def real_slots(lengths: Tensor, width: int) -> Tensor:
    """bool [B, width]: True at the first lengths[b] places of row b. lengths: int64 [B]."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def block_index(length: int, block_size: int, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """The block of each response slot, int64 [B, length], and whether it is its first slot, bool.

    anchor: int64 [B] in [0, L): the first block has `anchor` slots (L where it is 0), all others L.
    """
    shift = (block_size - anchor) % block_size
    slots = torch.arange(length, device=anchor.device)[None, :] + shift[:, None]
    block_of = slots // block_size
    is_slot0 = slots % block_size == 0
    if length:
        is_slot0[:, 0] = True
    return block_of, is_slot0


def _checked_anchor(anchor: Tensor | None, like: Tensor, block_size: int) -> Tensor:
    if anchor is None:
        return torch.zeros_like(like)
    if anchor.shape != like.shape or bool(((anchor < 0) | (anchor >= block_size)).any()):
        raise ValueError(f"anchor must be int64 [{len(like)}] in [0, {block_size}), got {anchor.tolist()}")
    return anchor


def _allowed(prompt_real: Tensor, real: Tensor, block_of: Tensor, context: Context, copies: int) -> Tensor:
    """The predicate of the module's head as bool [B, T, T]."""
    batch, width = prompt_real.shape
    response = real.shape[1]
    total = width + response * (1 + copies)
    allowed = torch.zeros(batch, total, total, dtype=torch.bool, device=real.device)
    clean = slice(width, width + response)
    allowed[:, :width, :width] = prompt_real[:, None, :]
    allowed[:, :width, :width] &= torch.ones(width, width, dtype=torch.bool, device=real.device).tril()
    allowed[:, width:, :width] = prompt_real[:, None, :]
    same = (block_of[:, :, None] == block_of[:, None, :]) & real[:, None, :]
    before = (block_of[:, None, :] < block_of[:, :, None]) & real[:, None, :]
    if context == "block":
        allowed[:, clean, clean] = before | same
    else:
        causal = torch.ones(response, response, dtype=torch.bool, device=real.device).tril()
        allowed[:, clean, clean] = causal & real[:, None, :]
    for copy in range(copies):
        noisy = slice(clean.stop + copy * response, clean.stop + (copy + 1) * response)
        allowed[:, noisy, clean] = before
        allowed[:, noisy, noisy] = same
    allowed.diagonal(dim1=1, dim2=2).fill_(True)
    return allowed


def build_layout(
    prompt: tuple[Tensor, Tensor],
    response: tuple[Tensor, Tensor],
    spec: BlockDiffusionSpec,
    masked: Tensor | None = None,
    anchor: Tensor | None = None,
) -> Layout:
    """Lay a batch out as `[P | C | N1 ... NK]`.

    prompt: ids int64 [B, P] and lengths int64 [B]; response: ids [B, R] and lengths; both right-padded with
    any id, the lengths alone tell what is real.
    masked: bool [B, K, R], which slots of each noisy copy hold `spec.mask_id`; None for no
    copy. anchor: int64 [B], see `block_index`. What is masked is known by position only: a literal mask id in
    a prompt or response is ordinary text. ValueError: an empty prompt, a masked slot 0, shapes that do not
    fit.
    """
    (prompt_ids, prompt_length), (ids, response_length) = prompt, response
    batch, width = prompt_ids.shape
    size = ids.shape[1]
    if batch and int(prompt_length.min()) < 1:
        raise ValueError("every prompt needs at least one token: it scores the first response token")
    anchor = _checked_anchor(anchor, prompt_length, spec.block_size)
    block_of, is_slot0 = block_index(size, spec.block_size, anchor)
    if masked is None:
        masked = torch.zeros(batch, 0, size, dtype=torch.bool, device=ids.device)
    if masked.shape[::2] != ids.shape or masked.dim() != 3:
        raise ValueError(f"masked must be bool [B, K, R] = [{batch}, K, {size}], got {list(masked.shape)}")
    if bool((masked & is_slot0[:, None]).any()):
        raise ValueError(
            "slot 0 of a block is masked: it is scored by the clean stream and must stay visible"
        )
    copies = masked.shape[1]
    real = real_slots(response_length, size)
    noisy = torch.where(masked, spec.mask_id, ids[:, None]).flatten(1)
    of_prompt = torch.arange(width, device=ids.device).expand(batch, width)
    of_response = prompt_length[:, None] + torch.arange(size, device=ids.device)[None, :]
    clean_source, own = _sources(prompt_length, width, size, copies)
    return Layout(
        ids=torch.cat([prompt_ids, ids, noisy], dim=1),
        positions=torch.cat([of_prompt, of_response.repeat(1, 1 + copies)], dim=1),
        allowed=_allowed(real_slots(prompt_length, width), real, block_of, spec.context, copies),
        source=torch.where(is_slot0[:, None], clean_source[:, None], own),
        clean_source=clean_source,
        clean_scorable=real & (is_slot0 if spec.context == "block" else torch.ones_like(is_slot0)),
        block_of=block_of,
        is_slot0=is_slot0,
        real=real,
    )


def _sources(prompt_length: Tensor, width: int, size: int, copies: int) -> tuple[Tensor, Tensor]:
    """The place in T before each response slot: in the clean stream [B, R], in each noisy copy [B, K, R]."""
    batch = len(prompt_length)
    slot = torch.arange(size, device=prompt_length.device)
    clean = (width + slot - 1).expand(batch, size).clone()
    clean[:, :1] = prompt_length[:, None] - 1
    starts = width + size * (1 + torch.arange(copies, device=prompt_length.device))
    return clean, (starts[:, None] + slot[None, :] - 1).expand(batch, copies, size)


def extend_to_block(
    response: Tensor,
    response_length: Tensor,
    answer: Tensor,
    eos_id: int,
    block_size: int,
    anchor: Tensor | None = None,
) -> ExtendedResponse:
    """Fill each response with EOS from its first EOS to the end of that block; what came after it is dropped.

    response: int64 [B, R]; response_length: int64 [B]; answer: bool [B, R]; anchor as in `block_index`. A
    truncated response (no EOS within its length) is left as it is. The pad id may equal `eos_id`: only
    lengths are trusted.
    """
    anchor = _checked_anchor(anchor, response_length, block_size)
    width = response.shape[1]
    slot = torch.arange(width, device=response.device)[None, :]
    is_eos = (response == eos_id) & real_slots(response_length, width)
    first = torch.where(is_eos, slot, width).amin(dim=1) if width else torch.zeros_like(response_length)
    ended = first < width
    shift = (block_size - anchor) % block_size
    end = ((first + shift) // block_size + 1) * block_size - shift
    length = torch.where(ended, end, response_length)
    wide = max(int(length.max()), width) if len(length) else width
    extended = response.new_full((len(response), wide), eos_id)
    extended[:, :width] = response
    real = real_slots(length, wide)
    fill = ended[:, None] & real & ~real_slots(first + 1, wide)
    wide_answer = torch.zeros_like(fill)
    wide_answer[:, :width] = answer
    return ExtendedResponse(
        response=extended.masked_fill(fill, eos_id),
        response_length=length,
        answer=wide_answer & real & ~fill,
        fill=fill,
    )
