"""What a study reads of its runs without decoding: variants, seconds of training, where traces came from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from recbole_dgr2.model.checkpoint import INFO_FILE
from recbole_dgr2.pipeline.study_members import Member, members_of, training_seconds, training_traces, variant
from recbole_dgr2.pipeline.study_options import common_options, differing_options
from tests.toy_run import Finished


@pytest.mark.parametrize(
    "text", ["x", "x=saved/a", "x=saved/a:none", "=a:conversion", "x=a:conversion,b:ar_teacher"]
)
def test_a_variant_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=RUN:STAGE"):
        variant(text)
    with pytest.raises(ValueError, match="conversion is the name of another row"):
        variant("conversion=a:conversion")


def test_seconds_are_those_of_the_last_training(tmp_path: Path) -> None:
    assert training_seconds(tmp_path, "conversion") is None
    lines = ["conversion: started, 1 thread", "conversion: 12.5 s", "conversion: started, 1 thread"]
    lines += ["stage conversion: x is finished and up to date, reused", "conversion: 0.1 s"]
    (tmp_path / "run.log").write_text("".join(f"12:00:00 INFO {line}\n" for line in lines))
    assert training_seconds(tmp_path, "conversion") == 12.5
    assert training_seconds(tmp_path, "distillation") is None


def test_traces_are_told_where_they_are_not_the_reasoners_own(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    member = Member("ar_teacher", tmp_path / "run", "ar_teacher", 2020, "ar_teacher")
    assert training_traces(member) is None
    counts = {"lists": 8, "accepted": 5, "attempts": 20, "prompt_tokens": 0, "completion_tokens": 0}
    entry = {"phase": "training", "source": "evidence", "model": "reasoner", "mode": "rejection", **counts}
    info = json.loads((member.folder / INFO_FILE).read_text())
    info["data"]["traces"] = [entry]
    (member.folder / INFO_FILE).write_text(json.dumps(info))
    found = training_traces(member)
    assert (
        found is not None
        and "training 5 of 8 lists in 20 attempts of reasoner (evidence, rejection)" in found
    )
    assert training_traces(replace(member, name="conversion", stage="conversion")) is None


def test_naive_stands_beside_students_alone(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    names = [member.name for member in members_of([tmp_path / "run"], [])]
    assert names == ["ar_teacher", "naive", "conversion", "distillation", "reinforcement"]
    for stage in names[2:]:
        shutil.rmtree(tmp_path / "run" / stage)
    assert [member.name for member in members_of([tmp_path / "run"], [])] == ["ar_teacher"]


def test_options_of_several_runs() -> None:
    assert common_options([{"a": 1, "b": 2}, {"a": 1}]) == {"a": 1, "b": [2, None]}


def test_options_in_which_a_variant_differs() -> None:
    """Seed by seed; those of a stage that the variant was not asked for say nothing of it."""
    stages = {"stages": ["ar_teacher", "conversion"], "conversion_epochs": 2, "tau": 0.9}
    runs = [{"seed": 1, **stages}, {"seed": 2, **stages, "tau": 0.8}]
    own = [{**run, "stages": ["reinforcement"], "conversion_epochs": 1} for run in runs]
    pairs = list(zip(own, runs, strict=True))
    assert differing_options(pairs) == {"stages": ["reinforcement"]}
    changed = [({**run, "conversion_epochs": 3}, run) for run in runs]
    assert differing_options(changed) == {"conversion_epochs": 3}
    assert differing_options([changed[0], (runs[1], runs[1])]) == {"conversion_epochs": [3, None]}


@pytest.mark.parametrize("mode", [None, "speculative"])
def test_seeds_may_answer_in_other_modes_which_a_study_chooses_itself(
    finished: Finished, tmp_path: Path, mode: str | None
) -> None:
    """None: a run from before the option existed."""
    for name, seed in (("a", 2020), ("b", 2021)):
        shutil.copytree(finished.folder, tmp_path / name)
        content = json.loads((tmp_path / name / "run.json").read_text())
        content["options"]["seed"] = seed
        del content["options"]["decode_mode"]
        if name == "a" or mode:
            content["options"]["decode_mode"] = mode if name == "b" else "block"
        (tmp_path / name / "run.json").write_text(json.dumps(content))
    assert {member.seed for member in members_of([tmp_path / "a", tmp_path / "b"], [])} == {2020, 2021}
