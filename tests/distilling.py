"""A tiny student, its teacher, made-up answers of every shape, and the states that distillation scores of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from recbole_dgr2.decode.types import DecodeOptions
from recbole_dgr2.model.replay import NEVER, Trajectory
from recbole_dgr2.trainer import convert
from recbole_dgr2.trainer.answers import Answered
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.distillation import Distillation, DistillationOptions
from recbole_dgr2.trainer.distilled import State
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import frozen_teacher
from tests.tiny import EOS_ID, random_tokens, tiny_backbone
from tests.training import OPTIONS, DyingOnPolicy

L = 4
OWN = DistillationOptions(prompts=3, samples=2, all_mask_share=0.0)


class Mortal(DyingOnPolicy, Distillation):
    """The distillation, dying."""


def stage(
    own: Mapping[str, Any] | None = None,
    context: Any = "causal",
    size: int = L,
    seeds: tuple[int, int] = (0, 1),
    **changes: Any,
) -> Mortal:
    """The stage with a random student and a random teacher of those seeds."""
    architecture = changes.pop("architecture", "qwen3")
    student, spec = convert(tiny_backbone(architecture, seeds[0]), size, context)
    teacher = frozen_teacher(tiny_backbone(architecture, seeds[1]), student, spec)
    options = replace(OWN, **(own or {}))
    decoding = DecodeOptions("block", 11, 8, tau=0.01, temperature=options.temperature, seed=7)
    roller = Roller(student, spec, decoding)
    return Mortal(roller, replace(OPTIONS, **{"train_batch_size": 3, **changes}), {}, teacher, options)


def trajectory(key: int, prompt: Sequence[int], length: int, eos: bool, size: int = L) -> Trajectory:
    """A made-up one: random tokens and steps; slots after its end are partly committed, partly never."""
    random = torch.Generator().manual_seed(key)
    slots = -(-length // size) * size
    tokens = random_tokens([slots], seed=key)[0]
    if eos:
        tokens[length - 1] = EOS_ID
    steps = torch.randint(1, 4, (slots,), generator=random)
    steps[length:] = torch.where(torch.rand(slots - length, generator=random) < 0.5, NEVER, 1)
    steps[::size] = 0
    return Trajectory(
        key, tuple(prompt), tuple(tokens), tuple(steps.tolist()), (0.0,) * slots, size, 0.9, 1.0, length
    )


def answers(size: int = L) -> list[Answered]:
    """Ragged ones; the second is cut off at the token limit."""
    prompts, lengths = random_tokens([5, 3, 8, 2], seed=9), [6, 8, 10, 3]
    return [
        Answered(trajectory(i, prompt, length, i != 1, size), 50 + i, length - 2, None)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def the_state(tested: Distillation, batch: Sequence[Answered], step: int = 0) -> State:
    prepared = tested.prepare(batch, generators(0, step, [each.key for each in batch]))
    (state,) = prepared.units
    assert isinstance(state, State)
    return state


def response_slots(state: State, term: str) -> list[tuple[int, int]]:
    """(row, response slot) of every slot of a term that weighs anything: it is scored one position before it."""
    prompt = state.reading.layout.positions.new_tensor(prompt_lengths(state))
    slot = state.layout.positions[state.rows, state.cols] + 1 - prompt[state.rows]
    chosen = state.terms[term] > 0
    return list(zip(state.rows[chosen].tolist(), slot[chosen].tolist(), strict=True))


def prompt_lengths(state: State) -> list[int]:
    """The first slot of each answer is scored at the last prompt token."""
    layout = state.reading.layout
    return (layout.clean_source[:, 0] + 1).tolist()
