"""Conversion: weights kept, and the fine-tuning loss against a slot-by-slot computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.data.examples import Batch, Example, collate
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.trainer import STAGES, Conversion, convert
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.scoring import Scored
from tests.tiny import ARCHITECTURES, random_tokens, tiny_backbone
from tests.training import OPTIONS, Dying, Killed, same, weights

NOISE = NoiseOptions(t_min=0.05, all_mask_share=0.2, answer_only_share=0.3, random_anchor=True)


def stage(
    context: str = "causal", noise: NoiseOptions = NOISE, ar_weight: float = 0.2, **changes: Any
) -> Any:
    architecture, kind = changes.pop("architecture", "qwen3"), changes.pop("kind", Conversion)
    backbone, spec = convert(tiny_backbone(architecture), 4, context)  # type: ignore[arg-type]
    return kind(backbone, replace(OPTIONS, **changes), {}, spec, noise, ar_weight)


def examples(n: int) -> list[Example]:
    rows = random_tokens([3 + i % 4 for i in range(n)])
    answers = random_tokens([5 + i % 6 for i in range(n)], seed=1)
    return [Example(i, tuple(row), (*answers[i], 1), 3) for i, row in enumerate(rows)]


TRAIN = examples(12)


class Mortal(Dying, Conversion):
    """The conversion, dying."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_conversion_keeps_every_weight(architecture: str) -> None:
    before = weights(tiny_backbone(architecture))
    backbone, spec = convert(tiny_backbone(architecture), 32)
    assert same(weights(backbone), before)
    assert spec == BlockDiffusionSpec(block_size=32, mask_id=spec.mask_id, context="causal")
    assert spec.mask_id >= len(backbone.tokenizer)


def slots(prepared: Scored, stage: Conversion, term: str) -> list[tuple[int, int]]:
    """(row, position) of every token that a term scores: a token is scored one position before it."""
    layout = prepared.layout
    position = layout.positions[prepared.rows, prepared.cols] + 1
    chosen = prepared.terms[term] > 0
    return list(zip(prepared.rows[chosen].tolist(), position[chosen].tolist(), strict=True))


@pytest.mark.parametrize("context", ["causal", "block"])
def test_each_token_is_scored_masked_exactly_once(context: str) -> None:
    tested = stage(context)
    batch = collate(TRAIN, 0)
    for step in range(5):
        prepared = tested.prepare(batch, generators(0, step, range(12)))
        layout = prepared.layout
        start = batch.prompt_length[:, None] + torch.arange(layout.real.shape[1])
        maskable = layout.real & ~layout.is_slot0
        rows = torch.arange(12)[:, None].expand_as(maskable)[maskable]
        expected = sorted(zip(rows.tolist(), start[maskable].tolist(), strict=True))
        assert sorted(slots(prepared, tested, "masked")) == expected


def reference(tested: Conversion, prepared: Scored, batch: Batch) -> tuple[float, float]:
    """Both terms one slot at a time, each canvas alone: `[P | clean blocks before | the noisy block]`."""
    model, spec = tested.backbone.model, tested.spec
    layout, clean_width = prepared.layout, prepared.layout.real.shape[1]
    width = batch.prompt.shape[1]
    sums = {"masked": [0.0, 0.0], "ar": [0.0, 0.0]}
    for row in range(len(batch.keys)):
        prompt = batch.prompt[row, : batch.prompt_length[row]]
        real = int(layout.real[row].sum())
        response = layout.ids[row, width : width + real]
        weight = [1.0 if 3 <= k < batch.response_length[row] else 0.5 for k in range(real)]
        for copy in range(2):
            noisy_from = width + clean_width * (1 + copy)
            noisy = layout.ids[row, noisy_from : noisy_from + real]
            for k in range(real):
                if noisy[k] != spec.mask_id:
                    continue
                block = layout.block_of[row, :real] == layout.block_of[row, k]
                begin, stop = int(block.nonzero()[0]), int(block.nonzero()[-1]) + 1
                canvas = torch.cat([prompt, response[:begin], noisy[begin:stop]])[None]
                length = canvas.shape[1]
                allowed = torch.ones(length, length, dtype=torch.bool).tril()
                inside = slice(len(prompt) + begin, length)
                allowed[inside, inside] = True
                logits = model(canvas, attention_mask=allowed[None, None]).logits[0, len(prompt) + k - 1]
                logits[spec.mask_id] = -torch.inf
                sums["masked"][0] -= weight[k] * float(logits.log_softmax(-1)[response[k]])
                sums["masked"][1] += weight[k]
        logits = model(torch.cat([prompt, response])[None]).logits[0]
        logits[:, spec.mask_id] = -torch.inf
        for k in range(int(batch.response_length[row])):
            log_prob = logits[len(prompt) + k - 1].log_softmax(-1)[response[k]]
            sums["ar"][0] -= weight[k] * float(log_prob)
            sums["ar"][1] += weight[k]
    return sums["masked"][0] / sums["masked"][1], sums["ar"][0] / sums["ar"][1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_loss_is_the_slot_by_slot_one(architecture: str) -> None:
    tested = stage(architecture=architecture)
    batch = collate(TRAIN[:3], 0)
    prepared = tested.prepare(batch, generators(0, 3, range(3)))
    masked, ar = reference(tested, prepared, batch)
    loss, means = tested.loss(batch, generators(0, 3, range(3)))
    assert means["masked"] == pytest.approx(masked, rel=1e-4)
    assert means["ar"] == pytest.approx(ar, rel=1e-4)
    assert float(loss) == pytest.approx(masked + 0.2 * ar, rel=1e-4)
    assert 0 <= means["masked_accuracy"] <= 1


def test_block_context_scores_only_seeds_in_the_clean_stream() -> None:
    tested = stage("block")
    batch = collate(TRAIN, 0)
    prepared = tested.prepare(batch, generators(0, 0, range(12)))
    layout = prepared.layout
    for row, position in slots(prepared, tested, "ar"):
        assert layout.is_slot0[row, position - int(batch.prompt_length[row])]
    causal = stage().prepare(batch, generators(0, 0, range(12)))
    seeds, every = len(slots(prepared, tested, "ar")), len(slots(causal, tested, "ar"))
    assert seeds < every == int(batch.response_length.sum())


def test_eos_fill_is_learnt_on_canvases_to_the_end_of_its_block_only() -> None:
    noise = replace(NOISE, random_anchor=False, answer_only_share=0.0)
    tested = stage(noise=noise)
    eos = tested.backbone.eos_id
    whole, cut = Example(0, (3, 4), (5, 6, 7, 8, 9, eos), 2), Example(1, (3, 4), (5, 6, 7, 8, 9), 2)
    prepared = tested.prepare(collate([whole, cut], 0), generators(0, 0, [0, 1]))
    scored = {
        (term, row): sorted(at - 2 for of, at in slots(prepared, tested, term) if of == row)
        for term in ("masked", "ar")
        for row in (0, 1)
    }
    assert scored["masked", 0] == [1, 2, 3, 5, 6, 7]
    assert scored["ar", 0] == list(range(6))
    assert scored["masked", 1] == [1, 2, 3]
    assert scored["ar", 1] == list(range(5))
    first = (prepared.rows == 0) & (prepared.terms["masked"] > 0)
    assert prepared.targets[first].tolist().count(eos) == 3
    assert eos not in prepared.targets[prepared.rows == 1].tolist()


def test_padding_and_neighbours_change_nothing() -> None:
    tested = stage()
    total = {"masked": 0.0, "ar": 0.0}
    weight = dict(total)
    for example in TRAIN[:4]:
        batch = collate([example], 0)
        prepared = tested.prepare(batch, generators(0, 0, [example.key]))
        sums = tested.score(tested.scorer, prepared)
        for name in total:
            total[name] += float(sums[name].detach())
            weight[name] += prepared.weights[name]
    batch = collate(TRAIN[:4], 0)
    wide = replace(
        batch,
        prompt=torch.nn.functional.pad(batch.prompt, (0, 5), value=1),
        response=torch.nn.functional.pad(batch.response, (0, 9), value=1),
        answer=torch.nn.functional.pad(batch.answer, (0, 9)),
    )
    for each in (batch, wide):
        _, means = tested.loss(each, generators(0, 0, range(4)))
        assert means["masked"] == pytest.approx(total["masked"] / weight["masked"], rel=1e-5)
        assert means["ar"] == pytest.approx(total["ar"] / weight["ar"], rel=1e-5)


def test_no_ar_weight_scores_no_clean_slot() -> None:
    prepared = stage(ar_weight=0.0).prepare(collate(TRAIN, 0), generators(0, 0, range(12)))
    assert list(prepared.terms) == ["masked"] and bool((prepared.terms["masked"] > 0).all())


@pytest.mark.parametrize("weight", [-0.1, float("nan")])
def test_bad_ar_weight(weight: float) -> None:
    with pytest.raises(ValueError, match="ar_weight"):
        stage(ar_weight=weight)


def test_fit_saves_the_spec_and_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    def fit(lives: int, folder: str) -> Mortal:
        tested = stage(kind=Mortal)
        tested.lives = lives
        tested.fit(TRAIN, TRAIN[:4], tmp_path / folder)
        return tested

    unbroken = fit(0, "unbroken")
    with pytest.raises(Killed):
        fit(7, "broken")
    assert same(weights(fit(0, "broken").backbone), weights(unbroken.backbone))
    backbone, info = load_stage(tmp_path / "broken")
    assert info.block_diffusion == unbroken.spec and info.parent == "ar_teacher"
    assert same(weights(backbone), weights(unbroken.backbone))


def test_learns_a_small_task(tmp_path: Path) -> None:
    tested = stage(epochs=60, learning_rate=2e-2, train_batch_size=12, eval_step=0, save_step=0)
    train = [Example(i, (10 + i,), (*tuple(20 + i + k for k in range(6)), 1), 3) for i in range(12)]
    tested.fit(train, [], tmp_path / "stage")
    _, means = tested.loss(collate(train, 0), generators(0, 99, range(12)))
    assert means["masked_accuracy"] > 0.9 and means["ar_accuracy"] > 0.9


def test_stage_names() -> None:
    names = ["mid_training", "ar_teacher", "ar_teacher_rl", "conversion", "distillation", "reinforcement"]
    assert list(STAGES) == names and all(stage.name == name for name, stage in STAGES.items())
