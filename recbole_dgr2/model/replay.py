"""Exact replay of recorded decoding: each token is scored again on the canvas that the decoder saw.

A block decoder commits the slots of a block in several passes, each from a canvas in which the slots committed before
are visible. The layout `[P | C | N1 ... NK]` of `block_diffusion` holds all of these canvases: copy Ns shows every
block as it was before its pass s, slots that were never committed stay masked in all of them, and the seeds (slot 0)
are scored by the clean stream. An autoregressive trajectory is one of blocks of one slot: seeds alone, no copy.

Source: trajectory replay of Diffusion-GR2 (arXiv 2607.01170, Section 3.6) and TraceRL (arXiv 2509.06949).

Memory: a forward over B trajectories of at most R slots holds B * (P + R * (1 + K)) tokens, and a mask of the square of
that a row. K is the most passes of any block, up to L - 1. `replay_chunks` cuts the K copies, which do not see one
another, into groups of at most `max_copies`, so a forward holds at most B * (P + R * (1 + max_copies)) tokens, and
leaves out the trajectories that have no pass in a group.

Symbols: B trajectories, R response width, K copies, M scored slots, L block length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec, Layout, build_layout, real_slots
from recbole_dgr2.model.forward import without_mask_id

SEED, NEVER = 0, -1
PLAIN = BlockDiffusionSpec(block_size=1, mask_id=0, context="causal")


@dataclass(frozen=True)
class Trajectory:
    """One decoded response with everything that is needed to score it again. Tuples have one entry a slot.

    key: keys its random numbers; not negative. prompt_ids: at least one token.
    tokens: every slot of every started block, those after the end of the sequence in the last block included (they
        were context); any id where the step is -1.
    steps: 0 for a seed (scored by the clean stream), s >= 1 for a slot committed by pass s of its block, -1 for one
        that was never committed.
    log_probs: at the rollout, at `temperature` (at 1 when that is 0).
    block_size, tau, temperature: the rule it was decoded with; block_size 1 for autoregressive decoding.
    length: tokens that count: up to and including the end of the sequence, or up to the token limit.

    Raises ValueError (one line, with the key) when these do not fit together.
    """

    key: int
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    log_probs: tuple[float, ...]
    block_size: int
    tau: float
    temperature: float
    length: int

    def __post_init__(self) -> None:
        slots, size = len(self.tokens), self.block_size
        if self.key < 0 or not self.prompt_ids:
            raise ValueError(f"trajectory {self.key}: expected a key >= 0 and at least one prompt token")
        if len(self.steps) != slots or len(self.log_probs) != slots or size < 1 or slots % size:
            raise ValueError(
                f"trajectory {self.key}: {slots} tokens, {len(self.steps)} steps, {len(self.log_probs)} log_probs, "
                f"expected as many of each, in whole blocks of {size}"
            )
        if not 1 <= self.length <= slots or min(self.steps[: self.length]) < SEED:
            raise ValueError(
                f"trajectory {self.key}: length {self.length}, expected 1..{slots} and no masked slot within"
            )
        seeds = [slot for slot, step in enumerate(self.steps) if step == SEED]
        if seeds != list(range(0, slots, size)):
            raise ValueError(
                f"trajectory {self.key}: step 0 at slots {seeds}, expected it at slot 0 of each block of {size} alone"
            )

    @property
    def passes(self) -> int:
        """Most denoising passes of any of its blocks; 0 where all slots are seeds."""
        return max(0, *self.steps)


@dataclass(frozen=True)
class Replay:
    """A padded batch of trajectories, ready for one forward.

    layout: `[P | C | N1 ... NK]`. rows, cols: int64 [M], where each scored slot is read in the layout (batch row,
    index into T). targets: int64 [M], the token committed there. slots: int64 [M], its response slot. copies: int64
    [M], the noisy copy that scores it, from 0 among those of this layout; -1 for the clean stream (seeds). counted:
    bool [M], whether the slot is within the trajectory's `length`. temperature: the logits are divided by it; 1
    where the rollout was greedy.
    """

    layout: Layout
    rows: Tensor
    cols: Tensor
    targets: Tensor
    slots: Tensor
    copies: Tensor
    counted: Tensor
    temperature: float

    def take(self, chosen: Tensor) -> Replay:
        """The same layout with some of the scored slots: bool [M] or indices int64 [m]."""
        names = ("rows", "cols", "targets", "slots", "copies", "counted")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def to(self, device: torch.device) -> Replay:
        """The same batch on `device`."""
        layout = replace(self.layout, **{name: part.to(device) for name, part in vars(self.layout).items()})
        moved = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, layout=layout, **moved)


def replay_all(trajectories: Sequence[Trajectory], spec: BlockDiffusionSpec | None, pad_id: int) -> Replay:
    """Every committed slot of every trajectory, scored on the canvas before its own pass.

    K is the most passes of any block of the batch; blocks share copies. spec: of the model, None for a plain
    autoregressive one. pad_id: written into padding, read by nobody.

    Raises ValueError: no trajectory; trajectories of different block sizes or temperatures; no spec for one that was
    decoded in blocks.
    """
    return replay_copies(trajectories, spec, pad_id, range(max(t.passes for t in trajectories)))


def replay_chunks(trajectories: Sequence[Trajectory], max_copies: int) -> list[tuple[tuple[int, ...], range]]:
    """How to replay a batch in forwards of at most `max_copies` noisy copies: trajectories and copies of each.

    Each entry holds indices into `trajectories` and the range of copies for `replay_copies`; together they score
    every slot once. A trajectory is in an entry only where it has slots to score there.
    """
    if max_copies < 1:
        raise ValueError(f"max_copies {max_copies}: expected at least 1")
    most = max(trajectory.passes for trajectory in trajectories)
    chunks = []
    for start in range(0, max(most, 1), max_copies):
        copies = range(start, min(start + max_copies, most))
        kept = (i for i, trajectory in enumerate(trajectories) if not start or trajectory.passes > start)
        chunks.append((tuple(kept), copies))
    return chunks


def replay_copies(
    trajectories: Sequence[Trajectory], spec: BlockDiffusionSpec | None, pad_id: int, copies: range
) -> Replay:
    """The part of `replay_all` in some copies: copy c shows each block before its pass c + 1.

    Scored are the slots that those passes committed, and the seeds where `copies` begins at 0.
    """
    canvas = _Canvas.of(trajectories, spec, pad_id)
    before = torch.tensor([copy + 1 for copy in copies], dtype=torch.long)
    masked = (canvas.steps[:, None] >= before[:, None]) | (canvas.steps == NEVER)[:, None]
    scored = canvas.steps[:, None] == before[:, None]
    return _without_idle(canvas.lay_out(masked, scored, seeds=copies.start == 0), scored)


def replay_one(
    trajectories: Sequence[Trajectory],
    spec: BlockDiffusionSpec,
    pad_id: int,
    generators: Sequence[torch.Generator],
) -> Replay:
    """One recorded state of each block, drawn uniformly among its passes, in one noisy copy.

    Scored are the slots still masked there that were committed later, those after the end of the sequence included
    (`counted` tells them apart); seeds are not. generators: one CPU generator a trajectory, so that its states do not
    depend on its neighbours. Errors as in `replay_all`.
    """
    canvas = _Canvas.of(trajectories, spec, pad_id)
    before = torch.ones_like(canvas.steps)
    for row, (trajectory, generator) in enumerate(zip(trajectories, generators, strict=True)):
        size = trajectory.block_size
        passes = canvas.steps[row, : len(trajectory.tokens)].view(-1, size).amax(dim=1).clamp_min(1)
        drawn = (torch.rand(len(passes), generator=generator) * passes).long() + 1
        before[row, : len(trajectory.tokens)] = drawn.repeat_interleave(size)
    later = canvas.steps >= before
    return canvas.lay_out((later | (canvas.steps == NEVER))[:, None], later[:, None], seeds=False)


def replayed_logits(scorer: nn.Module, replay: Replay, mask_id: int | None) -> Tensor:
    """float32 logits [M, V] of the scored slots at the rollout's temperature, the mask token at minus infinity.

    scorer: a `TokenScorer`, wrapped or not. mask_id: None for a model without a mask token.
    """
    layout = replay.layout
    logits = scorer(layout.ids, layout.positions, layout.allowed, replay.rows, replay.cols)
    return without_mask_id(logits, mask_id) / replay.temperature


def replayed_log_probs(scorer: nn.Module, replay: Replay, mask_id: int | None) -> Tensor:
    """float32 [M]: log-probability of each committed token on the canvas before its pass; differentiable."""
    scores = replayed_logits(scorer, replay, mask_id).log_softmax(dim=-1)
    return scores.gather(1, replay.targets[:, None])[:, 0]


def _without_idle(replay: Replay, scored: Tensor) -> Replay:
    """The same replay without the canvases, a block of a copy each, in which no slot is scored.

    scored: bool [B, K, R], by which the replay was laid out. Blocks take unequal numbers of passes, so that about four
    canvases of ten are idle. What is left moves up; `layout.source` of an idle canvas is 0.
    """
    layout = replay.layout
    batch, copies, width = scored.shape
    used = torch.zeros(batch, copies, int(layout.block_of.max()) + 1, dtype=torch.bool)
    blocks = layout.block_of[:, None].expand_as(scored)
    used = used.scatter_reduce(2, blocks, scored, reduce="amax").gather(2, blocks).flatten(1)
    shared = torch.ones(batch, layout.ids.shape[1] - copies * width, dtype=torch.bool)
    kept = torch.cat([shared, used], dim=1)
    # a row with less to keep is filled up with idle canvases: nobody attends them
    order = torch.argsort(~kept, dim=1, stable=True)[:, : int(kept.sum(dim=1).max())]
    places = torch.zeros_like(layout.ids).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    places = places.masked_fill(~kept, 0)
    rows = torch.arange(batch)[:, None]
    layout = replace(
        layout,
        ids=layout.ids[rows, order],
        positions=layout.positions[rows, order],
        allowed=layout.allowed[rows[:, :, None], order[:, :, None], order[:, None, :]],
        source=places.gather(1, layout.source.flatten(1)).view(scored.shape),
    )
    return replace(replay, layout=layout, cols=places[replay.rows, replay.cols])


@dataclass(frozen=True)
class _Canvas:
    """Padded trajectories: prompt and response ids with lengths, steps [B, R] (0 in padding)."""

    prompt: tuple[Tensor, Tensor]
    response: tuple[Tensor, Tensor]
    steps: Tensor
    counts: Tensor
    spec: BlockDiffusionSpec
    temperature: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], spec: BlockDiffusionSpec | None, pad_id: int) -> _Canvas:
        rules = sorted({(t.block_size, t.temperature) for t in trajectories})
        if len(rules) != 1:
            raise ValueError(
                f"replay: trajectories of (block size, temperature) {rules}, expected one of these alone"
            )
        ((block_size, temperature),) = rules
        if spec is None and block_size > 1:
            raise ValueError(
                f"replay: block size {block_size} without a block-diffusion spec, expected 1 (autoregressive)"
            )
        return cls(
            prompt=_padded([t.prompt_ids for t in trajectories], pad_id),
            response=_padded([t.tokens for t in trajectories], pad_id),
            steps=_padded([t.steps for t in trajectories], SEED)[0],
            counts=torch.tensor([t.length for t in trajectories]),
            spec=replace(spec or PLAIN, block_size=block_size),
            temperature=temperature or 1.0,
        )

    def lay_out(self, masked: Tensor, scored: Tensor, seeds: bool) -> Replay:
        """masked, scored: bool [B, K, R]; `seeds`: also score slot 0 of every block, in the clean stream."""
        layout = build_layout(self.prompt, self.response, self.spec, masked)
        rows, copies, slots = scored.nonzero(as_tuple=True)
        cols = layout.source[rows, copies, slots]
        if seeds:
            seed_rows, seed_slots = (layout.is_slot0 & layout.real).nonzero(as_tuple=True)
            rows, slots = torch.cat([seed_rows, rows]), torch.cat([seed_slots, slots])
            copies = torch.cat([torch.full_like(seed_rows, NEVER), copies])
            cols = torch.cat([layout.clean_source[seed_rows, seed_slots], cols])
        counted = real_slots(self.counts, self.steps.shape[1])[rows, slots]
        targets = self.response[0][rows, slots]
        return Replay(layout, rows, cols, targets, slots, copies, counted, self.temperature)


def _padded(rows: Sequence[tuple[int, ...]], fill: int) -> tuple[Tensor, Tensor]:
    """int64 [B, longest] and lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), int(lengths.max())), fill)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values)
    return padded, lengths
