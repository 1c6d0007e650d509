"""Batches of on-policy distillation: what the teacher reads of each answer, and the canvas that the student reads.

B answers, R response width, T slots that the teacher scores (every slot of every answer up to its end), M slots that a
state scores, L block length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recbole_dgr2.data.examples import Batch
from recbole_dgr2.model.block_diffusion import (
    BlockDiffusionSpec,
    Layout,
    block_index,
    build_layout,
    extend_to_block,
    real_slots,
)
from recbole_dgr2.model.loss import token_weights
from recbole_dgr2.model.noise import NoiseOptions, draw_anchors, draw_masks
from recbole_dgr2.model.replay import NEVER, Trajectory, replay_one
from recbole_dgr2.trainer.scoring import Scored

_PLAIN = BlockDiffusionSpec(block_size=1, mask_id=0, context="causal")
_ANY_ANCHOR = NoiseOptions(random_anchor=True)
_ANY_SHARE = NoiseOptions(all_mask_share=0.0, answer_only_share=0.0)


@dataclass(frozen=True)
class Reading:
    """What the teacher reads: `[P | C]`, causal; rows, cols: int64 [T], where each slot of each answer is scored.

    keys: of the lists that are answered.
    """

    layout: Layout
    rows: Tensor
    cols: Tensor
    keys: tuple[int, ...]

    def to(self, device: torch.device) -> Reading:
        """The same on `device`."""
        rows, cols = self.rows.to(device), self.cols.to(device)
        return replace(self, layout=_moved(self.layout, device), rows=rows, cols=cols)


@dataclass(frozen=True)
class State:
    """Canvases of some answers, in one layout of the student, and what the teacher reads of the same answers.

    rows, cols: int64 [M], where each scored slot is read in the layout. index: int64 [M], the same slot among those
    of the teacher. answer: bool [M]. share: float32 [M], masked share of the slot's block, its seed left out; 0 for
    a slot of the clean stream. terms: weight of every scored slot in every loss term, float32 [M] each.
    """

    reading: Reading
    layout: Layout
    rows: Tensor
    cols: Tensor
    index: Tensor
    answer: Tensor
    share: Tensor
    terms: dict[str, Tensor]

    @property
    def weights(self) -> dict[str, float]:
        """Sum of weights a term, and the number of slots that each metric is a mean over."""
        masked = self.share > 0
        counts = {"agreement": masked, "reasoning": masked & ~self.answer, "answer": masked & self.answer}
        return {name: float(value.sum(dtype=torch.float64)) for name, value in (self.terms | counts).items()}

    def to(self, device: torch.device) -> State:
        """The same on `device`."""
        names = ("rows", "cols", "index", "answer", "share")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        moved["terms"] = {name: weight.to(device) for name, weight in self.terms.items()}
        return replace(self, reading=self.reading.to(device), layout=_moved(self.layout, device), **moved)


@dataclass(frozen=True)
class Units:
    """Forward passes of one batch: canvases of its answers in up to two layouts, and of the traces if asked for."""

    units: tuple[State | Scored, ...]

    @property
    def weights(self) -> dict[str, float]:
        """Sums over the units."""
        sums: Counter[str] = Counter()
        for unit in self.units:
            sums.update(unit.weights)
        return dict(sums)

    def to(self, device: torch.device) -> Units:
        """The same on `device`."""
        return Units(tuple(unit.to(device) for unit in self.units))


def recorded(
    trajectories: Sequence[Trajectory],
    spec: BlockDiffusionSpec,
    pad_id: int,
    generators: Sequence[torch.Generator],
) -> tuple[Layout, Tensor]:
    """`[P | C | N]` with one recorded state of each block, and which slots are masked there, bool [B, 1, R]."""
    replay = replay_one(trajectories, spec, pad_id, generators)
    masked = torch.zeros_like(replay.layout.real)
    masked[replay.rows, replay.slots] = True
    for row, trajectory in enumerate(trajectories):
        masked[row, : len(trajectory.steps)] |= torch.tensor(trajectory.steps) == NEVER
    return replay.layout, masked[:, None]


def all_masked(
    trajectories: Sequence[Trajectory],
    spec: BlockDiffusionSpec,
    pad_id: int,
    generators: Sequence[torch.Generator],
) -> tuple[Layout, Tensor]:
    """`[P | C | N]` with every slot but the seeds masked, blocks counted from a random anchor; and which are masked,
    bool [B, 1, R].

    What a speculative decoder drafts from: it begins a block wherever the last draft was cut. The canvas of the last
    block is whole, as in decoding, whatever the answer's length.
    """
    size, tokens = spec.block_size, [each.tokens[: each.length] for each in trajectories]
    anchor = draw_anchors(size, _ANY_ANCHOR, generators)
    shift = (size - anchor) % size
    length = torch.tensor([len(row) for row in tokens])
    whole = ((length + shift - 1) // size + 1) * size - shift
    filled = [(*row, *(pad_id,) * (end - len(row))) for row, end in zip(tokens, whole.tolist(), strict=True)]
    prompt, response = padded([each.prompt_ids for each in trajectories], pad_id), padded(filled, pad_id)
    _, is_slot0 = block_index(response[0].shape[1], size, anchor)
    masked = (real_slots(whole, response[0].shape[1]) & ~is_slot0)[:, None]
    return build_layout(prompt, response, spec, masked, anchor), masked


def drawn(
    trajectories: Sequence[Trajectory],
    spec: BlockDiffusionSpec,
    pad_id: int,
    generators: Sequence[torch.Generator],
) -> tuple[Layout, Tensor]:
    """`[P | C | N1 | N2]` with a share of each block masked at random, the rest of it in the other copy, so that each
    slot is scored once; and which slots are masked there, bool [B, 2, R].

    For validation: a student that decodes in fewer passes leaves fewer and emptier states behind, so a loss on its
    recorded states would rise as it improves.
    """
    prompt = padded([each.prompt_ids for each in trajectories], pad_id)
    response = padded([each.tokens for each in trajectories], pad_id)
    steps, _ = padded([each.steps for each in trajectories], 0)
    real = real_slots(response[1], steps.shape[1])
    block_of, is_slot0 = block_index(steps.shape[1], spec.block_size, torch.zeros_like(response[1]))
    pair = draw_masks(real, block_of, is_slot0, torch.zeros_like(real), _ANY_SHARE, generators)
    masked = pair | (steps == NEVER)[:, None]
    return build_layout(prompt, response, spec, masked), masked


def reading_of(trajectories: Sequence[Trajectory], keys: Sequence[int], pad_id: int) -> Reading:
    """What the teacher reads: every answer once, clean and causal; a slot is scored at the token before it.

    keys: of the lists that are answered.
    """
    prompt = padded([each.prompt_ids for each in trajectories], pad_id)
    response = padded([each.tokens[: each.length] for each in trajectories], pad_id)
    layout = build_layout(prompt, response, _PLAIN)
    rows, slots = layout.real.nonzero(as_tuple=True)
    return Reading(layout, rows, layout.clean_source[rows, slots], tuple(keys))


def state_of(
    reading: Reading,
    canvas: tuple[Layout, Tensor],
    starts: Sequence[int],
    weights: tuple[float, float],
    ar: bool,
) -> State:
    """A state with the terms `divergence` (masked slots of each answer) and, if `ar`, `ar` (the clean stream).

    Args:
        reading: of the same answers.
        canvas: from `recorded`, `all_masked` or `drawn`.
        starts: slot at which the ranked list of each answer begins.
        weights: of a reasoning and of an answer token.
        ar: whether the clean stream is scored, at every slot whose logit does not see the token itself.
    """
    layout, masked = canvas
    size = layout.real.shape[1]
    length = reading.layout.real.sum(dim=1)
    real = real_slots(length, size)
    answer = real & (torch.arange(size) >= torch.tensor(starts)[:, None])
    of_slot = token_weights(answer, real, *weights)
    rows, copies, slots = (masked & real[:, None]).nonzero(as_tuple=True)
    clean_rows, clean_slots = (layout.clean_scorable & (of_slot > 0) & ar).nonzero(as_tuple=True)
    noisy_weight, clean_weight = of_slot[rows, slots], of_slot[clean_rows, clean_slots]
    terms = {"divergence": torch.cat([noisy_weight, torch.zeros_like(clean_weight)])}
    if ar:
        terms["ar"] = torch.cat([torch.zeros_like(noisy_weight), clean_weight])
    shares = _masked_share(layout, masked)[rows, copies, slots]
    share = torch.cat([shares, torch.zeros_like(clean_weight)])
    cols = torch.cat([layout.source[rows, copies, slots], layout.clean_source[clean_rows, clean_slots]])
    rows, slots = torch.cat([rows, clean_rows]), torch.cat([slots, clean_slots])
    index = (length.cumsum(0) - length)[rows] + slots
    return State(reading, layout, rows, cols, index, answer[rows, slots], share, terms)


def _masked_share(layout: Layout, masked: Tensor) -> Tensor:
    """float32 [B, K, R]: masked share of the maskable slots of each slot's block."""
    maskable = (layout.real & ~layout.is_slot0)[:, None].expand_as(masked)
    block_of = layout.block_of[:, None].expand_as(masked)
    sums = [
        torch.zeros(masked.shape).scatter_add(2, block_of, values.float()).gather(2, block_of)
        for values in (masked, maskable)
    ]
    return sums[0] / sums[1].clamp_min(1.0)


def traces_of(
    batch: Batch,
    spec: BlockDiffusionSpec,
    eos_id: int,
    noise: NoiseOptions,
    weights: tuple[float, float],
    generators: Sequence[torch.Generator],
) -> Scored:
    """Supervised traces as complementary pairs of canvases, `[P | C | N1 | N2]`, masked as in the conversion; the
    term `supervised` scores the masked slots. weights: of a reasoning and of an answer token."""
    size = spec.block_size
    anchor = draw_anchors(size, noise, generators)
    full = extend_to_block(batch.response, batch.response_length, batch.answer, eos_id, size, anchor)
    block_of, is_slot0 = block_index(full.response.shape[1], size, anchor)
    masked = draw_masks(full.real, block_of, is_slot0, full.answer, noise, generators)
    prompt, response = (batch.prompt, batch.prompt_length), (full.response, full.response_length)
    layout = build_layout(prompt, response, spec, masked, anchor)
    of_slot = token_weights(full.answer, full.real, *weights)
    rows, copies, slots = (masked & (of_slot > 0)[:, None]).nonzero(as_tuple=True)
    terms = {"supervised": of_slot[rows, slots]}
    return Scored(layout, rows, layout.source[rows, copies, slots], full.response[rows, slots], terms)


def padded(rows: Sequence[tuple[int, ...]], pad_id: int) -> tuple[Tensor, Tensor]:
    """int64 [B, longest] and lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), int(lengths.max())), pad_id)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = torch.tensor(ids)
    return padded, lengths


def _moved(layout: Layout, device: torch.device) -> Layout:
    return replace(layout, **{name: part.to(device) for name, part in vars(layout).items()})
