"""Where the stages of a run start from, and the lists that reinforcement learning practises on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2 import stages
from recbole_dgr2.config import Config
from recbole_dgr2.stage_order import PARENTS, start_folder, teacher_folder
from tests.toy_run import Finished

Build = Callable[..., Config]


def config_of(build: Build, names: list[str], folders: list[str], **keys: Any) -> tuple[Config, Path]:
    """A config of those stages in a run folder that holds those finished stages."""
    config = build(stages=names, run_dir="run", **keys)
    for folder in folders:
        (Path("run") / folder).mkdir(parents=True)
    return config, Path("run")


@pytest.mark.parametrize(
    ("names", "folders", "start"),
    [
        (["ar_teacher", "conversion", "distillation", "reinforcement"], [], None),
        (["conversion", "reinforcement", "distillation"], ["ar_teacher", "conversion"], "ar_teacher"),
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
        (
            ["distillation"],
            ["conversion"],
            "distillation learns from the teacher, and there is no run/ar_teacher",
        ),
        (["reinforcement"], ["ar_teacher"], "from the distillation of an earlier run"),
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


def test_the_teacher_is_the_one_with_reinforcement_learning(toy_config: Build) -> None:
    config, run = config_of(
        toy_config, ["conversion"], ["ar_teacher", "ar_teacher_rl"], ar_teacher_rl_iterations=2
    )
    assert start_folder(config) == teacher_folder(config, run) == run / "ar_teacher_rl"
    assert list(PARENTS) == ["ar_teacher", "conversion", "distillation", "reinforcement"]


def test_lists_of_reinforcement_learning_are_hits_and_are_judged_by_their_target(finished: Finished) -> None:
    setting = finished.setting
    train, valid, judge = stages._hits(setting, "reinforcement", conditional_bonus=False)
    assert train and valid and not judge.conditional_bonus
    assert set(judge.slots) == {request.key for request in (*train, *valid)}
    for requests, lists in ((train, setting.learnt[0]), (valid, setting.learnt[1])):
        rows = lists.candidates.rows
        keys = (rows.users.astype(np.int64) * 2**24 + rows.ends).tolist()
        for request in requests:
            row = keys.index(request.key)
            slot, n = judge.slots[request.key]
            assert lists.candidates.ids[row, slot] == lists.targets[row] and n == lists.candidates.counts[row]
