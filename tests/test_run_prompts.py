"""Prompts of a run: rebuilt as they were when it is opened again, within its budgets, and refused before any work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recbole_dgr2.data.template import load_template
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.open_run import open_run
from recbole_dgr2.pipeline.preparation import tasks_of
from recbole_dgr2.system.paths import prompt_file
from tests.toy_run import Finished, run


def test_an_opened_run_builds_the_prompts_it_was_trained_on(finished: Finished) -> None:
    setting = finished.setting
    prompts = open_run(finished.folder).language_model("ar_teacher").prompts
    tasks = tasks_of(setting.grounding.final, setting.test, np.arange(20))
    assert [prompts.build(task) for task in tasks] == [setting.prompts.build(task) for task in tasks]


def test_the_report_says_what_was_trimmed(finished: Finished) -> None:
    training, test = finished.report["trimmed"]
    assert (training["phase"], training["prompts"]) == ("training", len(finished.setting.train))
    assert (test["phase"], test["trimmed"]) == ("test", 0)
    assert test["prompts"] >= 8


def test_template_and_budgets_are_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own file may change afterwards, or not be there."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.yaml"
    text = prompt_file("compact").read_bytes().replace(b"\n", b"\r\n").replace(b"likes", "schätzt".encode())
    own.write_bytes(text)
    run(tmp_path, stages=[], prompt=str(own), candidate_tokens=40, history_tokens=9, run_dir="out")
    own.unlink()
    opened = open_run("out")
    kept = prompt_file(opened.config["prompt"])
    assert kept.read_bytes() == text
    assert load_template(kept).sections["opening"].template.startswith("schätzt")
    limits = views.token_limits(opened.config)
    assert (limits.candidate, limits.history) == (40, 9)


def test_semantic_ids_are_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"prompt 'gr2' uses \$sid, but there are no semantic IDs; set semantic_ids"
    ):
        run(tmp_path, prompt="gr2")
    assert not (tmp_path / "saved").exists()
