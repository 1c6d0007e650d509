"""How a run answers is one option: the report and `recommend` follow it, and the exact modes agree with one another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.decode.types import MODES
from recbole_dgr2.diagnose import diagnose
from recbole_dgr2.pipeline.open_run import open_run
from recbole_dgr2.pipeline.preparation import make_lists, tasks_of
from recbole_dgr2.recommend import main
from tests.test_quick_start import models
from tests.toy_run import Build, Finished, run

EXACT = ("autoregressive", "speculative", "auto")


@pytest.fixture(scope="module")
def tokens(finished: Finished) -> dict[str, list[tuple[int, ...]]]:
    """What the conversion answers in each mode, token by token."""
    found = {}
    for mode in MODES:
        opened = open_run(finished.folder, decode_mode=mode)
        lists = make_lists(opened.data, opened.source, "test", opened.config["n_candidates"])
        model = opened.language_model("conversion")
        requests = model.requests(tasks_of(model.tasks, lists, np.arange(20)))
        found[mode] = [completion.token_ids for completion in model.decode(requests).completions]
    return found


def test_exact_modes_answer_as_the_autoregressive_one_does(tokens: dict[str, list[tuple[int, ...]]]) -> None:
    assert tokens["speculative"] == tokens["auto"] == tokens["autoregressive"]
    assert tokens["block"] != tokens["autoregressive"]  # so that the line above can fail
    assert len({*tokens["autoregressive"]}) > 1


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
    log = (tmp_path / "again" / "run.log").read_text()
    assert log.count("is finished and up to date, reused") == 3
    assert "conversion, mode auto at batch 1: " in log
    for mode, found in rows.items():
        decode = found["conversion"]["decode"]
        assert decode["mode"] == mode
        drafts = mode == "speculative"
        assert (decode["tau"], decode["block_size"]) == ((0.9, 16) if drafts else (None, None))
        assert found["naive"]["decode"]["mode"] == "block"  # any exact mode would give the teacher's answers
        for key in ("hits", "ci95", "valid_rate", "failures", "copied", "faithfulness"):
            assert found["conversion"][key] == rows["autoregressive"]["conversion"][key]
    assert rows["autoregressive"]["conversion"]["decode"]["speedup_vs_ar"] == 1.0
    assert json.loads((tmp_path / "again" / "run.json").read_text())["options"]["decode_mode"] == "auto"


def test_diagnoses_are_of_blocks_whatever_the_run_answers_with(finished: Finished) -> None:
    plain, *others = (
        diagnose(open_run(finished.folder, decode_mode=mode), 4) for mode in ("block", "speculative", "auto")
    )
    assert others == [plain, plain]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decode_mode": "parallel"}, "decode_mode .*block, speculative, auto, autoregressive"),
        (
            {"decode_mode": "speculative", "context": "block"},
            "decode_mode: speculative .* context: block does",
        ),
        ({"decode_mode": "auto", "context": "block"}, "expected decode_mode: block, or context: causal"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    toy_config: Build, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(**keys)
