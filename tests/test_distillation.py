"""On-policy distillation: the loss against a slot-by-slot computation, which slots are scored, and what it teaches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recbole_dgr2.data.examples import Example, collate
from recbole_dgr2.decode.types import DecodeOptions, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.model.replay import NEVER, Trajectory
from recbole_dgr2.trainer import ARTeacher, Conversion, convert
from recbole_dgr2.trainer.answers import Answered, answer_marker, answer_start, turn_of
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.distillation import Distillation, DistillationOptions
from recbole_dgr2.trainer.distilled import State, Units, drawn, reading_of, state_of
from recbole_dgr2.trainer.on_policy import Material
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import frozen_teacher
from tests.test_stage import OPTIONS, Killed, same, weights
from tests.tiny import ARCHITECTURES, EOS_ID, random_tokens, tiny_backbone

L = 4
OWN = DistillationOptions(prompts=3, samples=2, all_mask_share=0.0)
STATES = pytest.mark.parametrize("all_mask_share", [0.0, 1.0], ids=["recorded", "all_masked"])


class Mortal(Distillation):
    """Dies when it prepares its n-th training batch, or collects for the n-th time."""

    lives, collections = 0, 0

    def parts(self, batch: Sequence[Answered], generators: Sequence[torch.Generator]) -> list[Units]:
        self.lives -= 1
        if self.lives == 0:
            raise Killed
        return super().parts(batch, generators)

    def collect(self, prompts: Sequence[Example], iteration: int) -> Material:
        self.collections -= 1
        if self.collections == 0:
            raise Killed
        return super().collect(prompts, iteration)


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


def test_any_callable_may_teach() -> None:
    tested, batch = stage(), answers()
    wanted = tested.loss(batch, generators(0, 0, range(4)))[1]
    scorer = tested.teacher
    tested.teacher = lambda *inputs: scorer(*inputs)  # such as one backbone with its adapter off
    assert tested.loss(batch, generators(0, 0, range(4)))[1] == wanted
    assert tested.settings()["teacher"] is None


def test_a_teacher_without_the_rows_of_the_conversion_is_the_same() -> None:
    tested, batch = stage(), answers()
    wanted = tested.loss(batch, generators(0, 0, range(4)))[1]
    assert isinstance(tested.teacher, TokenScorer)
    tested.teacher.model.resize_token_embeddings(tested.spec.mask_id)
    short = tested.loss(batch, generators(0, 0, range(4)))[1]
    assert short["divergence"] == pytest.approx(
        wanted["divergence"], rel=0.2
    )  # spare rows no longer take mass


def other_tokenizer(backbone: Backbone) -> Backbone:
    from tests.tiny import CORPUS, train_tokenizer

    return Backbone(backbone.model, train_tokenizer(CORPUS, 300, ("<c1>",)))


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    student, spec = convert(tiny_backbone(), L)
    with pytest.raises(
        ValueError, match=r"teacher: its tokenizer has .*expected the parent.*ar_teacher"
    ) as caught:
        frozen_teacher(other_tokenizer(tiny_backbone()), student, spec)
    assert "\n" not in str(caught.value)
    big = tiny_backbone()
    big.model.resize_token_embeddings(student.rows + 64)
    with pytest.raises(ValueError, match=rf"teacher: {student.rows + 64} embedding rows, the student has"):
        frozen_teacher(big, student, spec)
    tested = stage()
    tested.teacher = lambda ids, positions, allowed, rows, cols: torch.zeros(len(rows), 17)
    with pytest.raises(ValueError, match="teacher: 17 embedding rows"):
        tested.loss(answers(), generators(0, 0, range(4)))


def test_a_teacher_that_gives_no_number_is_an_error_that_names_the_list() -> None:
    tested = stage()
    scorer = tested.teacher

    def broken(*inputs: Tensor) -> Tensor:
        logits = scorer(*inputs)
        logits[int((inputs[3] == 2).nonzero()[1]), 4] = math.nan
        return logits

    tested.teacher = broken
    with pytest.raises(FloatingPointError, match="NaN for list 52") as caught:
        tested.loss(answers(), generators(0, 0, range(4)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", 0.0, r"temperature=0.0 with samples=2: .*above 0"),
        ("temperature", math.inf, "temperature=inf"),
        ("samples", 0, "samples=0: expected an integer >= 1"),
        ("prompts", 0, "prompts=0"),
        ("ar_weight", -1.0, "ar_weight=-1.0"),
        ("supervised_weight", math.nan, "supervised_weight=nan"),
        ("all_mask_share", 1.5, r"all_mask_share=1.5: .*\[0, 1\]"),
        ("divergence", "kl", "divergence must be one of"),
        ("beta", 0.0, "beta"),
        ("teacher_top_k", -1, "top_k"),
    ],
)
def test_bad_options_are_one_line_errors(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        replace(OWN, **{name: value})
    assert "\n" not in str(caught.value)


def test_the_student_must_answer_in_blocks_at_the_given_temperature() -> None:
    tested = stage()
    plain = Roller(tested.backbone, None, replace(tested.roller.options, mode="autoregressive"))
    with pytest.raises(ValueError, match="mode 'autoregressive', expected converted weights"):
        Distillation(plain, OPTIONS, {}, tested.teacher, OWN)
    with pytest.raises(ValueError, match=r"temperature=0\.5: the rollouts have 1\.0"):
        Distillation(tested.roller, OPTIONS, {}, tested.teacher, replace(OWN, temperature=0.5))


def test_answers_begin_where_the_traces_say() -> None:
    examples = [Example(0, (1,), (5, 6, 40, 41, 7), 2), Example(1, (1,), (8, 40, 41, 9, 3), 1)]
    assert answer_marker(examples) == (40, 41)
    assert answer_start((3, 40, 5, 40, 41, 6), (40, 41)) == 3
    assert answer_start((3, 40), (40, 41)) == 2 and answer_start((3, 4), ()) == 2
    others = [*examples, Example(2, (1,), (41, 3), 0)]
    assert answer_marker(others) == (40,)  # no token is shared by all: the most frequent first one
    assert answer_marker([Example(0, (1,), (5, 6), 2)]) == ()


def test_every_list_has_its_turn() -> None:
    turns = [turn_of(7, 3, 5, iteration) for iteration in range(7)]
    assert all(len(turn) == 3 for turn in turns)
    drawn = [index for turn in turns for index in turn]
    for begin in range(0, 21, 7):
        assert sorted(drawn[begin : begin + 7]) == list(range(7))
    assert sorted(turn_of(7, 100, 5, 3)) == list(range(7))
    assert turn_of(7, 100, 5, 3) != turn_of(7, 100, 6, 3)


def prompts(n: int) -> list[Example]:
    """Each has its own fixed answer."""
    return [Example(i, (10 + i,), (*(20 + i + k for k in range(6)), EOS_ID), 3) for i in range(n)]


@pytest.mark.parametrize("supervised_weight", [0.0, 0.5])
def test_collected_answers_are_read_back_as_they_were(supervised_weight: float) -> None:
    tested = stage({"supervised_weight": supervised_weight})
    tested.marker = answer_marker(prompts(5))
    material = tested.collect(prompts(5), 0)
    assert len(material.examples) == tested.per_iteration(5) == 6
    assert {answered.list_key for answered in material.examples} <= set(range(5))
    again = [tested.example(json.loads(json.dumps(asdict(answered)))) for answered in material.examples]
    assert again == list(material.examples)
    assert all((answered.example is not None) == bool(supervised_weight) for answered in again)
    assert tested.collect(prompts(5), 0) == material and tested.collect(prompts(5), 1) != material


def test_killed_and_resumed_is_the_unbroken_run(tmp_path: Path) -> None:
    own = {"all_mask_share": 0.4, "supervised_weight": 0.1}

    def fit(folder: str, **lives: int) -> Distillation:
        tested = stage(own, epochs=3, save_step=1)
        for name, value in lives.items():
            setattr(tested, name, value)
        tested.fit(prompts(5), prompts(2), tmp_path / folder)
        return tested

    unbroken = fit("unbroken")
    # first in the middle of an iteration, then when the next one collects, then in its first step
    for lives in ({"lives": 2}, {"collections": 1}, {"lives": 1}):
        with pytest.raises(Killed):
            fit("broken", **lives)
    resumed = fit("broken")
    assert same(weights(resumed.backbone), weights(unbroken.backbone))
    _, info = load_stage(tmp_path / "broken")
    assert (info.stage, info.parent, info.block_diffusion) == ("distillation", "conversion", unbroken.spec)
    assert (
        info.data["training"]["history"] == load_stage(tmp_path / "unbroken")[1].data["training"]["history"]
    )


def token_share(roller: Roller, wanted: Sequence[tuple[int, ...]], asked: Sequence[Example]) -> float:
    """Share of the wanted tokens that the greedy answers have in their place."""
    found = roller.greedy([Request(e.key, e.prompt_ids) for e in asked])
    pairs = [
        (a, b)
        for completion, answer in zip(found, wanted, strict=True)
        for a, b in zip(answer, (*completion.token_ids, *(-1,) * len(answer)), strict=False)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_the_student_learns_to_answer_like_its_teacher(tmp_path: Path) -> None:
    train = prompts(6)
    options = replace(OPTIONS, epochs=30, learning_rate=2e-2, train_batch_size=6, eval_step=0, save_step=0)
    teacher = tiny_backbone()
    ARTeacher(teacher, options, {}).fit(train, [], tmp_path / "teacher")
    student, spec = convert(load_stage(tmp_path / "teacher")[0], L)
    roller = Roller(student, spec, DecodeOptions("block", 11, 8, tau=0.5, temperature=1.0))
    plain = Roller(teacher, None, DecodeOptions("autoregressive", 11, 8, temperature=1.0))
    wanted = [
        completion.token_ids for completion in plain.greedy([Request(e.key, e.prompt_ids) for e in train])
    ]
    assert wanted == [example.response_ids for example in train]
    own = DistillationOptions(prompts=6, samples=2, all_mask_share=0.25)
    options = replace(options, epochs=20, learning_rate=8e-3)
    tested = Distillation(roller, options, {}, frozen_teacher(teacher, student, spec), own)
    share, before = token_share(roller, wanted, train), tested.assess(train)
    tested.fit(train, [], tmp_path / "stage")
    after = tested.assess(train)
    assert after["loss"] < 0.5 * before["loss"] and after["agreement"] > before["agreement"]
    assert token_share(roller, wanted, train) > max(0.75, share + 0.3)


def test_the_spec_of_a_shorter_block_is_that_of_the_rollouts() -> None:
    tested = stage(size=8)
    batch = answers(size=2)
    assert the_state(tested, batch).layout.is_slot0[0, :6].tolist() == [True, False] * 3
    assert tested.block_diffusion() == BlockDiffusionSpec(8, tested.spec.mask_id, "causal")
