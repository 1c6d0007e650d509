"""RL of the student: replayed objective, chunks, resuming bit for bit, and a reward that rises."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.graded import Graded, PolicyOptions, Practice, Replayed
from recbole_dgr2.trainer.on_policy import Material
from recbole_dgr2.trainer.reinforcement import Reinforcement
from recbole_dgr2.trainer.rollouts import Roller, Sampling
from tests.rolling import (
    EAGER,
    LESSONS,
    POLICY,
    PROMPTS,
    SAMPLING,
    Invalid,
    Vowels,
    assert_resumes,
    assert_reward_rises,
    converted,
    decoding,
    make,
    mortal,
)
from tests.training import OPTIONS, Killed, same, weights


def collected(**changes: Any) -> tuple[Reinforcement, Material]:
    stage = make(Reinforcement, "block", **changes)
    return stage, stage.collect(PROMPTS, 0)


def test_material_holds_replayed_log_probabilities_and_group_advantages() -> None:
    stage, material = collected()
    assert material.metrics["replay_gap_max"] < 1e-5
    assert 0 < material.metrics["reward"] < 1 and material.metrics["valid_rate"] == 1.0
    for graded in material.examples:
        trajectory = graded.trajectory
        for slot, (old, rolled) in enumerate(zip(graded.old_log_probs, trajectory.log_probs, strict=True)):
            assert old == (pytest.approx(rolled, abs=1e-5) if slot < trajectory.length else 0.0)
    groups = [material.examples[at : at + 4] for at in range(0, len(material.examples), 4)]
    assert len(groups) == material.metrics["groups"] <= SAMPLING.groups
    for group in groups:
        assert len({graded.trajectory.prompt_ids for graded in group}) == 1
        advantages = torch.tensor([graded.advantage for graded in group])
        assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
        assert float(advantages.square().mean()) == pytest.approx(1, abs=1e-5)
    assert stage.per_iteration(6) == 12 and stage.per_iteration(2) == 8


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_old_log_probabilities_are_at_the_temperature_of_the_rollouts(temperature: float) -> None:
    rolled = Roller(*converted(), decoding(temperature=temperature))
    stage = Reinforcement(rolled, OPTIONS, {"n": 10}, Practice(Vowels(), LESSONS), POLICY)
    assert stage.collect(PROMPTS, 0).metrics["replay_gap_max"] < 1e-5


def test_material_is_read_back_bit_for_bit() -> None:
    stage, material = collected()
    again = stage.read(material.to_json())
    assert list(again.examples) == list(material.examples)
    assert dict(again.metrics) == dict(material.metrics)
    with pytest.raises(ValueError, match="reward not finite"):
        Material([], {"reward": float("nan")}).to_json()


def test_before_an_update_the_gradient_is_the_policy_gradient() -> None:
    stage, material = collected(own=replace(POLICY, ar_weight=0.0))
    random = generators(7, 0, [graded.key for graded in material.examples])
    loss, means = stage.loss(material.examples, random)
    tokens = sum(graded.trajectory.length for graded in material.examples)
    expected = -sum(graded.advantage * graded.trajectory.length for graded in material.examples) / tokens
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    assert means["clipped"] == 0 and means["entropy"] > 1
    loss.backward()
    found = {name: p.grad.clone() for name, p in stage.backbone.model.named_parameters()}
    stage.backbone.model.zero_grad()
    prepared = stage.prepare(material.examples, random)
    log_probs, _ = stage._scores(stage.scorer, prepared.replay)
    (-(log_probs * prepared.advantages.float()).sum() / tokens).backward()
    for name, parameter in stage.backbone.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("max_copies", [1, 3, 99])
def test_chunks_change_nothing(max_copies: int) -> None:
    _, material = collected()
    losses, gradients = [], []
    for own in (replace(POLICY, max_copies=max_copies), POLICY):
        stage = make(Reinforcement, "block", own=own)
        batch = [
            replace(graded, old_log_probs=tuple(0.9 * value for value in graded.old_log_probs))
            for graded in material.examples
        ]
        loss, means = stage.loss(batch, generators(7, 0, [graded.key for graded in batch]))
        loss.backward()
        losses.append((float(loss.detach()), means["clipped"], means["entropy"], means["ar"]))
        gradients.append({name: p.grad for name, p in stage.backbone.model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5)


def test_only_tokens_up_to_the_end_count() -> None:
    stage, material = collected()
    prepared = stage.prepare(material.examples, generators(7, 0, range(len(material.examples))))
    assert isinstance(prepared, Replayed)
    assert len(prepared.old) == sum(graded.trajectory.length for graded in material.examples)
    assert prepared.weights["policy"] == len(prepared.old)


# of 2 iterations with 3 batches each; a validation of the starting weights comes first
@pytest.mark.parametrize(
    ("death", "again"),
    [
        ({"draws": 1}, [0, 1]),  # before the first rollouts are there
        ({"lives": 1}, [1]),  # after the rollouts, before the first step
        ({"lives": 3}, [1]),  # in mid-iteration
        ({"draws": 2}, [1]),  # between iterations
        ({"lives": 5}, []),  # in the middle of the second one
    ],
)
def test_killed_and_resumed_is_the_unbroken_run(
    death: dict[str, int], again: list[int], tmp_path: Path
) -> None:
    assert_resumes(Reinforcement, "block", death, again, tmp_path)


def test_torn_rollouts_are_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unbroken, broken = make(Reinforcement, "block"), make(mortal(Reinforcement), "block")
    unbroken.fit(PROMPTS, PROMPTS[:2], tmp_path / "unbroken")
    broken.lives = 2
    with pytest.raises(Killed):
        broken.fit(PROMPTS, PROMPTS[:2], tmp_path / "broken")
    kept = tmp_path / "broken.partial" / "material-000000.json"
    assert not list((tmp_path / "broken.partial").glob("*.pkl"))
    kept.write_text(kept.read_text().replace("0", "1", 1))
    resumed = make(Reinforcement, "block")
    resumed.fit(PROMPTS, PROMPTS[:2], tmp_path / "broken")
    assert "unreadable state" in caplog.text
    assert same(weights(resumed.backbone), weights(unbroken.backbone))


def test_history_says_what_the_rollouts_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stage = make(Reinforcement, "block")
    stage.fit(PROMPTS, PROMPTS[:2], tmp_path / "stage")
    _, info = load_stage(tmp_path / "stage")
    assert info.stage == "reinforcement" and info.parent == "distillation"
    assert info.block_diffusion == stage.spec
    history = info.data["training"]["history"]
    assert [record["epoch"] for record in history] == [-1.0, 0.0, 1.0]
    assert "valid_reward" in history[0] and "rollout_reward" not in history[0]
    wanted = {
        "rollout_reward", "rollout_valid_rate", "rollout_copied_share", "rollout_length", "rollout_dropped_share",
        "rollout_replay_gap", "rollout_replay_gap_max", "train_entropy", "train_clipped", "train_policy", "train_ar",
        "valid_reward", "valid_valid_rate",
    }  # fmt: skip
    assert wanted <= set(history[1])
    assert "reinforcement iteration 0: 12 examples [reward: " in caplog.text
    best = info.data["training"]["best_epoch"]
    rewards = {record["epoch"]: record["valid_reward"] for record in history}
    assert rewards[best] == max(rewards.values())
    assert stage.assess(PROMPTS[:2])["reward"] == pytest.approx(rewards[best])


def test_iterations_that_only_harm_leave_the_starting_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make(Reinforcement, "block", judge=Vowels(factor=-1.0), learning_rate=1e-9)
    start = weights(stage.backbone)
    stage.fit(PROMPTS, PROMPTS[:2], tmp_path / "stage")
    assert same(weights(stage.backbone), start)  # equal rewards are no improvement
    assert "reinforcement: no iteration improved on the starting weights, which are kept" in caplog.text


@pytest.mark.parametrize("context", ["causal", "block"])
def test_reward_rises(context: Any, tmp_path: Path) -> None:
    own = PolicyOptions(Sampling(4, 8, 1), 0.2, 0.2, max_copies=8)
    player = Roller(*converted(context=context), decoding(max_new_tokens=8))
    stage = Reinforcement(player, EAGER, {}, Practice(Vowels()), own, parent="conversion")
    assert assert_reward_rises(stage, tmp_path / "stage").parent == "conversion"


def test_all_invalid_groups_are_dropped_and_no_step_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make(Reinforcement, "block", judge=Invalid())
    start = weights(stage.backbone)
    stage.fit(PROMPTS, [], tmp_path / "stage")
    assert same(weights(stage.backbone), start)
    record = load_stage(tmp_path / "stage")[1].data["training"]["history"][0]
    assert record["rollout_dropped_share"] == 1.0 and record["rollout_valid_rate"] == 0.0
    assert record["rollout_reward"] == -1.0
    assert not [name for name in record if name.startswith("train_") or "replay_gap" in name]  # not 0
    assert "teach nothing" in caplog.text and "epoch 0 training" not in caplog.text


def test_dropout_is_off_in_replay_and_training(tmp_path: Path) -> None:
    stage = make(Reinforcement, "block")
    for layer in stage.backbone.model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.5))
    other = make(Reinforcement, "block")
    for each, name in ((stage, "dropout"), (other, "none")):
        each.fit(PROMPTS, [], tmp_path / name)
    assert same(weights(stage.backbone), weights(other.backbone))


def test_a_replay_that_is_off_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    stage, material = collected()
    graded = material.examples[0]
    wrong = replace(graded.trajectory, log_probs=tuple(value - 0.01 for value in graded.trajectory.log_probs))
    figures = stage._gaps([wrong], [graded.old_log_probs], 3)
    assert figures["replay_gap"] == pytest.approx(0.01, abs=1e-4)
    assert "iteration 3: replayed log-probabilities are up to 0.01" in caplog.text


def test_the_memory_bound_does_not_make_another_stage() -> None:
    settings = [
        json.dumps(make(Reinforcement, "block", own=own).settings(), sort_keys=True)
        for own in (POLICY, replace(POLICY, max_copies=7), replace(POLICY, clip_high=0.3))
    ]
    assert settings[0] == settings[1] != settings[2]
    judged = make(Reinforcement, "block", judge=Vowels(2.0)).settings()
    assert judged["judge"] != json.loads(settings[0])["judge"]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'block'"):
        make(Reinforcement, "autoregressive")
    practice = Practice(Vowels(), LESSONS)
    player = Roller(*converted(), decoding())
    with pytest.raises(ValueError, match="parent 'ar_teacher'"):
        Reinforcement(player, OPTIONS, {}, practice, POLICY, parent="ar_teacher")
    with pytest.raises(ValueError, match="no examples to rehearse"):
        Reinforcement(player, OPTIONS, {}, Practice(Vowels()), POLICY)
    for changed in ({"clip_low": 1.0}, {"clip_high": 0.0}, {"ar_weight": -1.0}, {"max_copies": 0}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            replace(POLICY, **changed)  # type: ignore[arg-type]


def test_graded_names_its_trajectory() -> None:
    _, material = collected()
    assert all(
        isinstance(graded, Graded) and graded.key == graded.trajectory.key for graded in material.examples
    )
    assert len({graded.key for graded in material.examples}) == len(material.examples)
