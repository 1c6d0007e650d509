"""How a run answers is one option: the report and `recommend` follow it, and the exact modes agree with one another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.pipeline.open_run import open_run
from recbole_dgr2.recommend import main
from tests.test_quick_start import models
from tests.toy_run import Build, Finished, run

EXACT = ("autoregressive", "speculative", "auto")


@pytest.mark.parametrize("mode", ["speculative", "auto"])
def test_exact_modes_recommend_what_the_autoregressive_one_does(finished: Finished, mode: str) -> None:
    users = [f"u{number}" for number in range(1, 31)]
    plain, other = (
        open_run(finished.folder, decode_mode=each).recommend(users, "reinforcement")
        for each in ("autoregressive", mode)
    )
    assert other == plain


def test_the_mode_reaches_the_model_and_leaves_a_teacher_alone(finished: Finished) -> None:
    opened = open_run(finished.folder, decode_mode="speculative")
    assert opened.language_model("conversion").options.mode == "speculative"
    assert opened.language_model("ar_teacher").options.mode == "autoregressive"
    assert open_run(finished.folder).language_model("conversion").options.mode == "block"


def test_the_command_has_it(finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for mode in EXACT:
        arguments = [f"--run_dir={finished.folder}", "--users=u1,u2,u3", f"--decode_mode={mode}"]
        assert main([*arguments, f"--output={tmp_path / mode}.jsonl"]) == 0
        found.append((tmp_path / f"{mode}.jsonl").read_text())
    assert found[0] == found[1] == found[2]
    with pytest.raises(SystemExit):
        main([*arguments[:2], "--decode_mode=parallel"])
    assert "invalid choice: 'parallel'" in capsys.readouterr().err


def test_the_report_follows_it_and_trains_nothing_anew(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "again")
    (tmp_path / "again" / "run.log").unlink()
    keys: dict[str, Any] = {"run_dir": str(tmp_path / "again"), "stages": ["conversion"]}
    rows = {mode: models(run(tmp_path, decode_mode=mode, **keys)) for mode in EXACT}
    assert (tmp_path / "again" / "run.log").read_text().count("is finished and up to date, reused") == 3
    for mode, found in rows.items():
        assert found["conversion"]["decode"]["mode"] == mode
        assert found["naive"]["decode"]["mode"] == "block"  # any exact mode would give the teacher's answers
        for key in ("hits", "ci95", "valid_rate", "failures", "copied", "faithfulness"):
            assert found["conversion"][key] == rows["autoregressive"]["conversion"][key]
    assert rows["autoregressive"]["conversion"]["decode"]["speedup_vs_ar"] == 1.0
    assert json.loads((tmp_path / "again" / "run.json").read_text())["options"]["decode_mode"] == "auto"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decode_mode": "parallel"}, "decode_mode .*block, speculative, auto, autoregressive"),
        ({"decode_mode": "speculative", "context": "block"}, "decode_mode: speculative verifies its drafts"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    toy_config: Build, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(**keys)
