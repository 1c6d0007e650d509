"""The loss of on-policy distillation against a slot-by-slot computation, and which slots are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recbole_dgr2.data.examples import Example, collate
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.model.replay import NEVER
from recbole_dgr2.trainer import Conversion
from recbole_dgr2.trainer.answers import Answered
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.distillation import Distillation
from recbole_dgr2.trainer.distilled import State, drawn, reading_of, state_of
from tests.distilling import (
    L,
    answers,
    response_slots,
    stage,
    the_state,
)
from tests.tiny import ARCHITECTURES, EOS_ID, tiny_backbone
from tests.training import OPTIONS

STATES = pytest.mark.parametrize("all_mask_share", [0.0, 1.0], ids=["recorded", "all_masked"])


def kl(teacher: Tensor, student: Tensor, mask_id: int) -> float:
    """KL(teacher || student) of two rows of logits, the mask token apart."""
    kept = torch.arange(len(teacher)) != mask_id
    p, q = teacher[kept].log_softmax(0), student[kept].log_softmax(0)
    return float((p.exp() * (p - q)).sum())


def reference(tested: Distillation, state: State, batch: Sequence[Answered]) -> dict[str, float]:
    """Both terms one slot at a time, each canvas alone: `[P | clean blocks before | the noisy block]`."""
    student, teacher = tested.backbone.model, tested.teacher
    assert isinstance(teacher, TokenScorer)
    layout, mask_id = state.layout, tested.spec.mask_id
    size = layout.real.shape[1]
    width = layout.ids.shape[1] - 2 * size
    found = {"divergence": [0.0, 0.0], "ar": [0.0, 0.0]}
    for row, answered in enumerate(batch):
        own = answered.trajectory
        prompt, clean = torch.tensor(own.prompt_ids), torch.tensor(own.tokens[: own.length])
        wanted = teacher.model(torch.cat([prompt, clean])[None]).logits[0, len(prompt) - 1 :]
        causal = student(torch.cat([prompt, clean])[None]).logits[0, len(prompt) - 1 :]
        noisy = layout.ids[row, width + size :]
        for slot in range(own.length):
            weight = 1.0 if slot >= answered.answer_start else 0.5
            found["ar"][0] += weight * kl(wanted[slot], causal[slot], mask_id)
            found["ar"][1] += weight
            if noisy[slot] != mask_id:
                continue
            block = ((layout.block_of[row] == layout.block_of[row, slot]) & layout.real[row]).nonzero()[:, 0]
            begin, stop = int(block[0]), int(block[-1]) + 1
            canvas = torch.cat([prompt, clean[:begin], noisy[begin:stop]])
            allowed = torch.ones(len(canvas), len(canvas), dtype=torch.bool).tril()
            allowed[len(prompt) + begin :, len(prompt) + begin :] = True
            logits = student(canvas[None], attention_mask=allowed[None, None]).logits[0]
            found["divergence"][0] += weight * kl(wanted[slot], logits[len(prompt) + slot - 1], mask_id)
            found["divergence"][1] += weight
    return {name: total / max(weight, 1e-9) for name, (total, weight) in found.items()}


@STATES
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_loss_is_the_slot_by_slot_one(architecture: str, all_mask_share: float) -> None:
    tested = stage({"all_mask_share": all_mask_share, "ar_weight": 0.5}, architecture=architecture)
    batch = answers()
    wanted = reference(tested, the_state(tested, batch), batch)
    loss, means = tested.loss(batch, generators(0, 0, range(4)))
    assert wanted["divergence"] > 0.1
    assert means["divergence"] == pytest.approx(wanted["divergence"], rel=1e-4)
    assert means["ar"] == pytest.approx(wanted["ar"], rel=1e-4)
    assert float(loss) == pytest.approx(wanted["divergence"] + 0.5 * wanted["ar"], rel=1e-4)


@torch.no_grad()
def test_a_student_that_is_its_teacher_has_nothing_to_learn_in_the_clean_stream() -> None:
    tested = stage(seeds=(1, 1))
    _, means = tested.loss(answers(), generators(0, 0, range(4)))
    assert means["ar"] == pytest.approx(0.0, abs=1e-6) and means["divergence"] > 1e-3
    alone = stage(seeds=(1, 1), size=1)  # every slot is a seed: the whole answer is the clean stream's
    batch = answers(size=1)
    assert not response_slots(the_state(alone, batch), "divergence")
    loss, _ = alone.loss(batch, generators(0, 0, range(4)))
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


def test_masked_slots_up_to_the_end_are_scored_and_nothing_else() -> None:
    tested, batch = stage(), answers()
    for step in range(4):
        state = the_state(tested, batch, step)
        width = state.layout.ids.shape[1] - 2 * state.layout.real.shape[1]
        noisy = state.layout.ids[:, width + state.layout.real.shape[1] :]
        expected = [
            (row, slot)
            for row, answered in enumerate(batch)
            for slot in range(answered.trajectory.length)
            if noisy[row, slot] == tested.spec.mask_id
        ]
        assert response_slots(state, "divergence") == expected
        assert all(slot % L for _, slot in expected)
        assert response_slots(state, "ar") == [
            (r, k) for r, a in enumerate(batch) for k in range(a.trajectory.length)
        ]


def test_each_canvas_is_a_recorded_state() -> None:
    tested, batch = stage(), answers()
    seen: set[tuple[int, int, tuple[bool, ...]]] = set()
    for step in range(40):
        state = the_state(tested, batch, step)
        size = state.layout.real.shape[1]
        noisy = state.layout.ids[:, -size:] == tested.spec.mask_id
        for row, answered in enumerate(batch):
            for begin in range(0, len(answered.trajectory.tokens), L):
                seen.add((row, begin, tuple(noisy[row, begin : begin + L].tolist())))
    expected = set()
    for row, answered in enumerate(batch):
        steps = answered.trajectory.steps
        for begin in range(0, len(steps), L):
            block = steps[begin : begin + L]
            for at in range(1, max(1, *block) + 1):
                expected.add((row, begin, tuple(step >= at or step == NEVER for step in block)))
    assert seen == expected


@torch.no_grad()
def test_validation_scores_every_masked_slot_once() -> None:
    tested, batch = stage(), answers()
    keys = [answered.key for answered in batch]
    layout, masked = drawn(
        [answered.trajectory for answered in batch], tested.spec, 0, generators(0, -1, keys)
    )
    reading = reading_of([answered.trajectory for answered in batch], keys, 0)
    state = state_of(
        reading, (layout, masked), [answered.answer_start for answered in batch], (0.5, 1.0), ar=True
    )
    expected = [(r, k) for r, a in enumerate(batch) for k in range(a.trajectory.length) if k % L]
    assert sorted(response_slots(state, "divergence")) == expected
    first = layout.ids[:, -2 * layout.real.shape[1] :].view(4, 2, -1) == tested.spec.mask_id
    assert torch.equal(first, masked)


def test_an_end_of_sequence_is_learnt_where_there_was_one() -> None:
    tested, batch = stage({"all_mask_share": 1.0, "ar_weight": 0.0}), answers()
    for step in range(20):
        scored = response_slots(the_state(tested, batch, step), "divergence")
        assert all(slot < batch[row].trajectory.length for row, slot in scored)
        if all((row, 5) in scored for row in (0, 1)):
            break
    assert batch[0].trajectory.tokens[5] == EOS_ID
    assert EOS_ID not in batch[1].trajectory.tokens[:8]  # cut off: its tokens teach, but none of them ends it


def test_drafts_are_whole_blocks_of_masks_from_any_anchor() -> None:
    tested, batch = stage({"all_mask_share": 1.0}), answers()
    seeds = set()
    for step in range(12):
        state = the_state(tested, batch, step)
        size = state.layout.real.shape[1]
        noisy, real = state.layout.ids[:, -size:], state.layout.real
        assert torch.equal(noisy == tested.spec.mask_id, real & ~state.layout.is_slot0)
        for row, answered in enumerate(batch):
            sizes = state.layout.block_of[row][real[row]].bincount().tolist()
            assert sizes[1:] == [L] * (len(sizes) - 1) and sum(sizes[:-1]) < answered.trajectory.length
            assert sum(sizes) >= answered.trajectory.length
            seeds |= {(row, slot) for slot in state.layout.is_slot0[row].nonzero()[:, 0].tolist()}
        masked = state.share[state.terms["divergence"] > 0]
        assert bool((masked == 1).all())
    assert {(2, slot) for slot in range(10)} <= seeds  # every slot was a seed once


@STATES
def test_padding_and_neighbours_change_nothing(all_mask_share: float) -> None:
    tested, batch = stage({"all_mask_share": all_mask_share}), answers()
    total: dict[str, float] = {}
    weight: dict[str, float] = {}
    for answered in batch:
        prepared = tested.prepare([answered], generators(0, 0, [answered.key]))
        for name, value in tested.score(tested.scorer, prepared).items():
            total[name] = total.get(name, 0.0) + float(value.detach())
            weight[name] = weight.get(name, 0.0) + prepared.weights[name]
    prepared = tested.prepare(batch, generators(0, 0, range(4)))
    sums = tested.score(tested.scorer, prepared)
    for name in sums:
        assert prepared.weights[name] == pytest.approx(weight[name])
        assert float(sums[name].detach()) == pytest.approx(total[name], rel=1e-4, abs=1e-4)


@torch.no_grad()
def test_parts_are_the_whole_in_pieces() -> None:
    tested = stage({"all_mask_share": 0.5, "supervised_weight": 0.3})
    example = Example(3, (5, 6), (7, 8, 9, EOS_ID), 2)
    batch = [replace(answered, example=example) for answered in answers()]
    step = next(s for s in range(20) if len(tested.prepare(batch, generators(0, s, range(4))).units) == 3)
    whole = tested.prepare(batch, generators(0, step, range(4)))
    parts = tested.parts(batch, generators(0, step, range(4)))
    scored = [tested.score(tested.scorer, part) for part in parts]
    for name, value in tested.score(tested.scorer, whole).items():
        pieces = sum(float(found.get(name, 0.0)) for found in scored)
        assert pieces == pytest.approx(float(value), rel=1e-5)
        assert whole.weights[name] == sum(part.weights.get(name, 0.0) for part in parts)


def test_block_context_scores_only_seeds_in_the_clean_stream() -> None:
    tested, batch = stage(context="block"), answers()
    scored = response_slots(the_state(tested, batch), "ar")
    assert scored == [(r, k) for r, a in enumerate(batch) for k in range(0, a.trajectory.length, L)]


def test_supervised_traces_are_masked_as_in_the_conversion() -> None:
    noise = NoiseOptions(all_mask_share=0.2)
    tested = stage({"supervised_weight": 0.7, "noise": noise, "all_mask_share": 1.0})
    examples = [Example(i, (5, 6, 7 + i), (*range(10, 15 + i), EOS_ID), 3) for i in range(4)]
    traces = tested.prepare(
        [replace(answered, example=e) for answered, e in zip(answers(), examples, strict=True)],
        generators(0, 0, range(4)),
    ).units[1]
    conversion = Conversion(tiny_backbone(), OPTIONS, {}, tested.spec, noise, 0.0)
    random = generators(0, 0, range(4))
    for each in random:  # what the drafts have drawn before
        torch.rand(1, generator=each)
        torch.randint(L, (1,), generator=each)
    wanted = conversion.prepare(collate(examples, 0), random)
    assert torch.equal(traces.layout.ids, wanted.layout.ids) and torch.equal(traces.cols, wanted.cols)
    assert torch.equal(traces.terms["supervised"], wanted.terms["masked"])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "own", [{"divergence": "reverse_kl"}, {"divergence": "jensen_shannon"}, {"teacher_top_k": 5}]
)
def test_every_divergence_has_finite_gradients(own: dict[str, Any]) -> None:
    tested = stage(own)
    loss, means = tested.loss(answers(), generators(0, 0, range(4)))
    loss.backward()
    gradients = [p.grad for p in tested.backbone.model.parameters()]
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)
    assert 0 < means["divergence"] < stage().loss(answers(), generators(0, 0, range(4)))[1]["divergence"] * 3
    assert isinstance(tested.teacher, TokenScorer)
    assert all(p.grad is None and not p.requires_grad for p in tested.teacher.parameters())


def test_the_spec_of_a_shorter_block_is_that_of_the_rollouts() -> None:
    tested = stage(size=8)
    batch = answers(size=2)
    assert the_state(tested, batch).layout.is_slot0[0, :6].tolist() == [True, False] * 3
    assert tested.block_diffusion() == BlockDiffusionSpec(8, tested.spec.mask_id, "causal")
