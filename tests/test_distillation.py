"""On-policy distillation: its options, whose turn it is, answers collected and resumed, and what it teaches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.data.examples import Example
from recbole_dgr2.decode.types import DecodeOptions, Request
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.trainer import ARTeacher, convert
from recbole_dgr2.trainer.answers import answer_marker, answer_start, turn_of
from recbole_dgr2.trainer.distillation import Distillation, DistillationOptions
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import frozen_teacher
from tests.distilling import (
    OWN,
    L,
    stage,
)
from tests.tiny import EOS_ID, tiny_backbone
from tests.training import OPTIONS, Killed, same, weights


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
    assert all(
        len(set(drawn[begin : begin + 6])) == 6 for begin in range(0, 18, 6)
    )  # in a round, and an iteration
    assert set(drawn) == set(range(7))
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


def test_rollouts_without_a_ranked_list_are_told() -> None:
    tested = stage()
    drawn = tested.collect(prompts(5), 0).examples
    tested.marker = drawn[0].trajectory.tokens[:1]
    holding = [tested.marker[0] in each.trajectory.tokens[: each.trajectory.length] for each in drawn]
    assert 0 < tested.collect(prompts(5), 0).metrics["listed"] == sum(holding) / len(drawn)
    tested.marker = ()
    assert tested.collect(prompts(5), 0).metrics["listed"] == 0


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
    for lives in ({"lives": 2}, {"draws": 1}, {"lives": 1}):
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
