"""Every shipped option is described and valid, and every key reaches the view that reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from recbole_dgr2.pipeline import stage_views, views
from recbole_dgr2.schema import read_options, read_yaml
from recbole_dgr2.system.paths import properties_dir
from tests.toy_run import Build

OTHERS = ("prompt", "accelerate", "scale")  # not options with their meaning
YAMLS = sorted(path for path in properties_dir().rglob("*.yaml") if path.parent.name not in OTHERS)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_every_shipped_option_is_described_and_valid(path: Path) -> None:
    options = read_options(path)
    assert [option.key for option in options] == list(read_yaml(path))
    for option in options:
        assert option.problem(option.default) is None, f"{path.name}: {option.key}"
        assert len(option.meaning) > 3


def test_views(toy_config: Build, tmp_path: Path) -> None:
    config = toy_config(tau=0.8, conversion_t_min=0.1, ar_teacher_epochs=7, block_size=16)
    run = views.run_options(config)
    assert run.run_dir == tmp_path / "saved" / "toy-ItemKNN-2020"
    assert run.stages == ("ar_teacher", "conversion", "distillation", "reinforcement")
    assert views.run_options(toy_config(threads="auto", run_dir="x")).threads is None
    assert views.candidate_options(config).n == 10
    assert views.prompt_options(config).title_field == "title"
    assert views.report_options(config).topk == (1, 3, 5, 10)
    assert views.embedded_spec(config).hidden_size == 32
    assert views.block_diffusion_spec(config, mask_id=9).block_size == 16
    assert views.noise_options(config).t_min == 0.1
    assert views.decode_options(config, "block").tau == 0.8
    assert views.decode_options(config, "autoregressive", batch_size=1).batch_size == 1
    teacher = views.stage_options(config, "ar_teacher")
    assert (teacher.epochs, teacher.seed) == (7, 2020)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 1  # type: ignore[misc]


def test_every_stage_key_is_a_field_of_its_views(toy_config: Build) -> None:
    config = toy_config()
    for stage in ("ar_teacher", "conversion"):
        fields = {field.name for field in dataclasses.fields(views.stage_options(config, stage))}
        fields |= {field.name for field in dataclasses.fields(views.noise_options(config))} | {"ar_weight"}
        for option in read_options(properties_dir() / "quick_start_config" / f"{stage}.yaml"):
            assert option.key.removeprefix(f"{stage}_") in fields


@pytest.mark.parametrize("stage", ["ar_teacher_rl", "reinforcement"])
def test_every_key_of_reinforcement_learning_reaches_its_view(toy_config: Build, stage: str) -> None:
    changed = {
        "iterations": 9,
        "groups": 3,
        "group_size": 5,
        "max_draws": 4,
        "temperature": 0.5,
        "clip_low": 0.1,
    }
    config = toy_config(tau=0.7, **{f"{stage}_{name}": value for name, value in changed.items()})
    options, policy = (
        stage_views.policy_stage_options(config, stage),
        stage_views.policy_options(config, stage),
    )
    decoding = stage_views.rollout_options(config, stage)
    assert (options.epochs, options.lr_schedule, options.seed) == (9, "constant", 2020)
    assert (policy.sampling.groups, policy.sampling.samples, policy.sampling.max_draws) == (3, 5, 4)
    assert policy.clip_low == 0.1 and policy.clip_high == {"ar_teacher_rl": 0.28, "reinforcement": 0.2}[stage]
    assert policy.ar_weight == {"ar_teacher_rl": 0.0, "reinforcement": 1.0}[stage]
    assert (decoding.temperature, decoding.tau, decoding.max_new_tokens) == (0.5, 0.7, 128)
    assert decoding.mode == {"ar_teacher_rl": "autoregressive", "reinforcement": "block"}[stage]
    fields = {field.name for view in (options, policy, decoding) for field in dataclasses.fields(view)}
    fields |= {"iterations", "groups", "group_size", "max_draws", "conditional_bonus", "eval_lists"}
    for option in read_options(properties_dir() / "quick_start_config" / f"{stage}.yaml"):
        assert option.key.removeprefix(f"{stage}_") in fields


@pytest.mark.parametrize("key", ["reinforcement_top_p", "reinforcement_top_k", "ar_teacher_rl_top_p"])
def test_sampling_from_a_part_of_the_distribution_is_refused(toy_config: Build, key: str) -> None:
    """Replay scores a token under the whole distribution."""
    with pytest.raises(ValueError, match=f"{key} .*knows this key"):
        toy_config(**{key: 0.9})
