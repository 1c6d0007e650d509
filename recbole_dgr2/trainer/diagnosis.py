"""What a student's greedy answers show of it, beside its teacher: divergences, confidences, label probabilities.

R answers, M masked slots, C committed slots, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from recbole_dgr2.decode.assignment import answer_slots
from recbole_dgr2.decode.types import Completion, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec, build_layout
from recbole_dgr2.model.divergence import Divergence, divergence
from recbole_dgr2.model.forward import TokenScorer, without_mask_id
from recbole_dgr2.model.replay import Trajectory
from recbole_dgr2.trainer.batches import VALIDATION_STEP, generators
from recbole_dgr2.trainer.distilled import padded, reading_of, recorded, state_of
from recbole_dgr2.trainer.rollouts import Roller, trajectory_of
from recbole_dgr2.trainer.teacher import Score, ask

TOGETHER = 8
"""Answers a forward pass."""


@dataclass(frozen=True)
class Examined:
    """What was seen, entry by entry.

    kl: float [M], KL(teacher || student) at the slots masked in a recorded state of their block, one state a block.
    share: float [M], masked share of that block, its seed left out. answer: bool [M], from the JSON object on.
    confidence: float [C], of every slot when it was committed. agrees: bool [C], whether the teacher's likeliest token
    is the same. labels: for every answer that ranks all N candidates, float [N, N]: probability of each label at each
    slot of the list, with all of the list masked and everything else in place.
    """

    kl: np.ndarray
    share: np.ndarray
    answer: np.ndarray
    confidence: np.ndarray
    agrees: np.ndarray
    labels: list[np.ndarray]


@torch.no_grad()
def examine(
    roller: Roller, teacher: Score, questions: Sequence[tuple[Request, int]], labels: Sequence[int], seed: int
) -> Examined:
    """Decodes greedily, and looks at what came out.

    Args:
        roller: converted weights and the rule they decode by.
        teacher: see `trainer.teacher`.
        questions: prompts, each with its number of candidates; at least one.
        labels: tokens of the candidate labels, in the candidates' order.
        seed: of the states that are looked at.
    """
    completions = roller.greedy([request for request, _ in questions])
    found = []
    for start in range(0, len(questions), TOGETHER):
        part = slice(start, start + TOGETHER)
        found.append(_examine(roller, teacher, questions[part], completions[part], seed))
    joined = {
        field.name: np.concatenate([getattr(each, field.name) for each in found])
        for field in fields(Examined)
        if field.name != "labels"
    }
    matrices = []
    for (request, count), completion in zip(questions, completions, strict=True):
        slots = answer_slots(completion.token_ids, labels[:count])
        if len(slots) == count:
            trajectory = trajectory_of(request.key, request.prompt_ids, completion)
            matrices.append(label_probabilities(roller, trajectory, slots, labels[:count]))
    return Examined(**joined, labels=matrices)


def _examine(
    roller: Roller,
    teacher: Score,
    questions: Sequence[tuple[Request, int]],
    completions: Sequence[Completion],
    seed: int,
) -> Examined:
    """Answers of one forward pass, without their label probabilities."""
    backbone, spec = roller.backbone, _spec(roller)
    trajectories = [
        trajectory_of(request.key, request.prompt_ids, completion)
        for (request, _), completion in zip(questions, completions, strict=True)
    ]
    keys = [trajectory.key for trajectory in trajectories]
    canvas = recorded(trajectories, spec, backbone.pad_id, generators(seed, VALIDATION_STEP, keys))
    starts = [json_start(backbone, completion.token_ids) for completion in completions]
    reading = reading_of(trajectories, keys, backbone.pad_id)
    state = state_of(reading, canvas, starts, (1.0, 1.0), ar=False).to(backbone.device)
    scores = ask(teacher, state.reading, backbone, spec, top_k=0)
    layout = state.layout
    logits = TokenScorer(backbone.model)(layout.ids, layout.positions, layout.allowed, state.rows, state.cols)
    confidences = [c.trace.confidences[: len(c.token_ids)] for c in completions]
    committed = [token for completion in completions for token in completion.token_ids]
    return Examined(
        kl=divergence(logits, scores, state.index, Divergence(), spec.mask_id).cpu().numpy(),
        share=state.share.cpu().numpy(),
        answer=state.answer.cpu().numpy(),
        confidence=np.concatenate(confidences),
        agrees=scores.best.cpu().numpy() == np.array(committed),
        labels=[],
    )


def _spec(roller: Roller) -> BlockDiffusionSpec:
    """Of the blocks that the roller decodes, which may be shorter than the trained ones."""
    if roller.spec is None:
        raise ValueError("diagnosis: weights that were not converted, expected a stage from conversion on")
    if roller.options.mode != "block":
        raise ValueError(f"diagnosis: mode {roller.options.mode!r} has no masked slots, expected 'block'")
    return replace(roller.spec, block_size=roller.options.block_size or roller.spec.block_size)


def json_start(backbone: Backbone, tokens: Sequence[int]) -> int:
    """Index of the last token that holds an opening brace: where the answer begins. Their number if there is none."""
    holding = (at for at in range(len(tokens) - 1, -1, -1) if "{" in backbone.tokenizer.decode([tokens[at]]))
    return next(holding, len(tokens))


def label_probabilities(
    roller: Roller, trajectory: Trajectory, slots: Sequence[int], labels: Sequence[int]
) -> np.ndarray:
    """float [slots, labels]: probabilities of the labels with these slots masked and all others in place.

    A slot that begins a block is scored by the clean stream, as in decoding.
    """
    backbone, spec = roller.backbone, _spec(roller)
    prompt, response = padded([trajectory.prompt_ids], 0), padded([trajectory.tokens], 0)
    masked = torch.zeros(1, 1, len(trajectory.tokens), dtype=torch.bool)
    masked[0, 0, [slot for slot in slots if slot % spec.block_size]] = True
    layout = build_layout(prompt, response, spec, masked)
    cols = layout.source[0, 0, list(slots)]
    inputs = (layout.ids, layout.positions, layout.allowed, torch.zeros_like(cols), cols)
    logits = TokenScorer(backbone.model)(*(each.to(backbone.device) for each in inputs))
    return without_mask_id(logits, spec.mask_id).softmax(dim=1)[:, list(labels)].cpu().numpy()
