"""Where the stages of a run start from, and the lists that reinforcement learning practises on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.config import Config
from recbole_dgr2.model.adapters import weights_digest
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo
from recbole_dgr2.pipeline import stages
from recbole_dgr2.pipeline.stage_order import (
    PARENTS,
    ancestor_teacher,
    require_shardable,
    start_folder,
    teacher_folder,
    unchanged_stages,
)
from recbole_dgr2.system import processes
from tests.toy_run import Build, Finished


def config_of(build: Build, names: list[str], folders: list[str], **keys: Any) -> tuple[Config, Path]:
    """A config of those stages in a run folder that holds those finished stages."""
    config = build(stages=names, run_dir="run", **keys)
    parents = {"ar_teacher_rl": "ar_teacher", "conversion": "ar_teacher", "distillation": "conversion"}
    for folder in folders:
        write_stage(Path("run") / folder, parents.get(folder))
    return config, Path("run")


def write_stage(folder: Path, parent: str | None, weights: str = "first") -> None:
    """A finished stage as far as its lineage goes; the weights are one word."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(f"{folder.name}: {weights}")
    above = folder.parent / str(parent)
    spec = None if folder.name.startswith("ar_teacher") else BlockDiffusionSpec(4, 7, "causal")
    digest = weights_digest(above) if above.is_dir() else None
    info = StageInfo(folder.name, parent, spec, parent_weights=digest)
    (folder / "dgr2.json").write_text(json.dumps(info.to_dict()))


@pytest.mark.parametrize(
    ("names", "folders", "start"),
    [
        (["ar_teacher", "conversion", "distillation", "reinforcement"], [], None),
        (["conversion", "distillation", "reinforcement"], ["ar_teacher", "conversion"], "ar_teacher"),
        (["distillation"], ["ar_teacher", "conversion"], "conversion"),
        (["reinforcement"], ["conversion", "distillation"], "distillation"),
        (["reinforcement"], ["conversion"], "conversion"),
        (["conversion", "reinforcement"], ["ar_teacher", "distillation"], "ar_teacher"),
        ([], [], None),
    ],
)
def test_the_first_stage_starts_from_the_best_parent(
    toy_config: Build, names: list[str], folders: list[str], start: str | None
) -> None:
    config, run = config_of(toy_config, names, folders)
    assert start_folder(config) == (None if start is None else run / start)


@pytest.mark.parametrize(
    ("names", "folders", "message"),
    [
        (
            ["conversion"],
            [],
            "from the ar_teacher of an earlier run, and there is no .*add ar_teacher to stages",
        ),
        (["distillation"], ["ar_teacher"], "from the conversion of an earlier run"),
        (["reinforcement"], ["ar_teacher"], "from the distillation or conversion of an earlier run"),
        (
            ["ar_teacher", "reinforcement"],
            [],
            "reinforcement starts from distillation or conversion, not from ar_",
        ),
    ],
)
def test_what_is_missing_is_named(
    toy_config: Build, names: list[str], folders: list[str], message: str
) -> None:
    config, _ = config_of(toy_config, names, folders)
    with pytest.raises(ValueError, match=message) as caught:
        start_folder(config)
    assert "\n" not in str(caught.value)


def test_stages_that_end_where_they_started_are_named(toy_config: Build) -> None:
    _, run = config_of(toy_config, [], ["ar_teacher", "conversion", "distillation"])
    kept = run / "reinforcement"
    write_stage(kept, "distillation")
    (kept / "model.safetensors").write_bytes((run / "distillation" / "model.safetensors").read_bytes())
    found = unchanged_stages(run, ["conversion", "distillation", "reinforcement"])
    assert found == [{"stage": "reinforcement", "parent": "distillation"}]
    assert unchanged_stages(run, ["conversion", "distillation"]) == []


def test_a_distillation_needs_its_own_teacher_only(toy_config: Build) -> None:
    """The converted weights are there to start from; the autoregressive ones may be gone where nobody asks them."""
    config, run = config_of(toy_config, ["distillation"], ["conversion"])
    assert start_folder(config) == run / "conversion"
    config["distillation_teacher"] = "ar_teacher"
    with pytest.raises(ValueError, match="learns from the teacher, and there is no run/ar_teacher"):
        start_folder(config)


def test_a_clean_stream_that_looks_ahead_is_no_teacher(toy_config: Build) -> None:
    stages = ["ar_teacher", "conversion", "distillation"]
    config, _ = config_of(toy_config, stages, [], context="block")
    with pytest.raises(ValueError, match="distillation_teacher conversion: with context block") as caught:
        start_folder(config)
    assert "set distillation_teacher ar_teacher" in str(caught.value)
    config["distillation_teacher"] = "ar_teacher"
    assert start_folder(config) is None


def test_the_teacher_is_what_the_conversion_grew_out_of(toy_config: Build) -> None:
    """Reinforcement learning of the teacher afterwards does not change whom its earlier conversion came from."""
    _, run = config_of(toy_config, ["distillation"], ["ar_teacher", "conversion", "ar_teacher_rl"])
    write_stage(run / "distillation", "conversion")
    assert (
        ancestor_teacher(run / "distillation") == ancestor_teacher(run / "conversion") == run / "ar_teacher"
    )
    write_stage(run / "conversion", "ar_teacher_rl")
    assert ancestor_teacher(run / "distillation") == run / "ar_teacher_rl"


@pytest.mark.parametrize(
    ("changed", "names", "child"),
    [
        ("ar_teacher", ["distillation"], "conversion"),
        ("ar_teacher", ["reinforcement"], "conversion"),  # two generations above the start
        ("conversion", ["reinforcement"], "distillation"),
        ("ar_teacher", ["conversion"], "ar_teacher_rl"),
    ],
)
def test_a_start_from_other_weights_parent_is_refused(
    toy_config: Build, changed: str, names: list[str], child: str
) -> None:
    every = ["ar_teacher", "ar_teacher_rl", "conversion", "distillation"]
    config, run = config_of(toy_config, names, every, ar_teacher_rl_iterations=1)
    start_folder(config)
    write_stage(run / changed, None if changed == "ar_teacher" else "ar_teacher", "second")
    with pytest.raises(ValueError, match="made from other weights") as caught:
        start_folder(config)
    assert f"{run / child} was made from other weights than {run / changed} holds now" in str(caught.value)
    assert f"run stage {child} again" in str(caught.value) and "\n" not in str(caught.value)
    write_stage(run / changed, None if changed == "ar_teacher" else "ar_teacher")
    start_folder(config)


def test_the_teacher_is_the_one_with_reinforcement_learning(toy_config: Build) -> None:
    config, run = config_of(
        toy_config, ["conversion"], ["ar_teacher", "ar_teacher_rl"], ar_teacher_rl_iterations=2
    )
    assert start_folder(config) == teacher_folder(config, run) == run / "ar_teacher_rl"
    assert list(PARENTS) == ["ar_teacher", "conversion", "distillation", "reinforcement"]


def test_sharded_weights_rule_muon_out_before_anything_is_prepared(
    toy_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"ar_teacher_optimizer": "adamw", "conversion_optimizer": "muon"}
    config, _ = config_of(toy_config, ["ar_teacher", "conversion"], [], **keys)
    require_shardable(config)
    monkeypatch.setattr(processes, "sharded", lambda: True)
    with pytest.raises(ValueError, match=r"conversion_optimizer: muon needs whole matrices.*expected adamw"):
        require_shardable(config)
    require_shardable(config_of(toy_config, ["ar_teacher"], [], **keys)[0])
    within = {"ar_teacher_rl_iterations": 1, "ar_teacher_rl_optimizer": "muon"}
    with pytest.raises(ValueError, match="ar_teacher_rl_optimizer: muon"):
        require_shardable(config_of(toy_config, ["ar_teacher"], [], **keys, **within)[0])
    with pytest.raises(ValueError, match="mid_training_optimizer: muon"):
        require_shardable(
            config_of(toy_config, ["ar_teacher"], [], **keys, mid_training_epochs=1, semantic_ids="kmeans")[0]
        )


def test_lists_of_reinforcement_learning_are_hits_and_are_judged_by_their_target(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = finished.setting
    monkeypatch.setitem(setting.config.final_config_dict, "reinforcement_eval_lists", 3)
    train, valid, judge = stages._hits(setting, "reinforcement", conditional_bonus=False)
    assert len(valid) == 3
    assert train and valid and not judge.conditional_bonus
    assert set(judge.slots) == {request.key for request in (*train, *valid)}
    for requests, lists in ((train, setting.learnt[0]), (valid, setting.learnt[1])):
        rows = lists.candidates.rows
        keys = (rows.users.astype(np.int64) * 2**24 + rows.ends).tolist()
        for request in requests:
            row = keys.index(request.key)
            slot, n = judge.slots[request.key]
            assert lists.candidates.ids[row, slot] == lists.targets[row] and n == lists.candidates.counts[row]
