"""One command on the toy data set, end to end: its report, what is reused, and bad input."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.pipeline.run_files import GROUNDING_FILE, read_grounding
from recbole_dgr2.quick_start import run_recbole_dgr2
from recbole_dgr2.report.evaluation import FAILURES, METRICS
from recbole_dgr2.report.schema import DECODE_KEYS, ROW_KEYS, RUN_KEYS, check_report
from run_recbole_dgr2 import main
from tests.toy_run import ROOT, TINY, Finished, run

MODELS = ("retriever", "ar_teacher", "naive", "conversion", "distillation", "reinforcement")
STAGES = ("ar_teacher", "conversion", "distillation", "reinforcement")
TIMES = ("seconds", "tokens_per_second", "speedup_vs_ar")


def models(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the retriever and of the language models by name, in the report's order; baselines left out."""
    return {row["name"]: row for row in report["rows"] if row["name"] in MODELS}


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """A report without its times."""
    kept = copy.deepcopy(report)
    del kept["phases"]
    for row in kept["rows"]:
        for name in TIMES if row["decode"] else ():
            del row["decode"][name]
    return kept


# the report
def test_the_report_has_its_schema(finished: Finished) -> None:
    report = finished.report
    check_report(report)
    assert set(RUN_KEYS) <= set(report)
    assert (report["dataset"], report["retriever"], report["n_candidates"]) == ("toy", "ItemKNN", 6)
    assert report["n_users"] == 60
    assert 0 < report["n_hits"] < 60
    assert {"recbole", "torch", "transformers", "python"} <= set(report["versions"])
    assert {"retriever", "candidates", *STAGES, "evaluation"} <= set(report["phases"])
    assert tuple(models(report)) == MODELS
    for row in models(report).values():
        assert tuple(row)[: len(ROW_KEYS)] == ROW_KEYS
        assert set(row["all"]) == set(METRICS)
        assert set(row["hits"]) == {name for name in METRICS if not name.endswith("@10")}
        assert row["hits"]["recall@5"] >= row["all"]["recall@5"]
        if row["name"] == "retriever":
            assert (row["valid_rate"], row["failures"], row["decode"]) == (None, {}, None)
            continue
        assert set(row["failures"]) == set(FAILURES)
        assert set(row["ci95"]) == {*row["hits"], "valid_rate"}
        assert tuple(row["decode"]) == DECODE_KEYS
        block = row["name"] != "ar_teacher"
        assert row["decode"]["mode"] == ("block" if block else "autoregressive")
        assert (row["decode"]["tau"], row["decode"]["block_size"]) == ((0.9, 16) if block else (None, None))
        assert row["decode"]["batch_size"] == 1


def test_it_is_written_with_the_stages(finished: Finished) -> None:
    assert json.loads((finished.folder / "report.json").read_text()) == finished.report
    names = {path.name for path in finished.folder.iterdir()}
    assert {"report.json", "run.log", *STAGES} <= names
    assert not [
        name for name in names if name.endswith((".partial", ".part", ".tmp")) or name.startswith(".")
    ]
    log = (finished.folder / "run.log").read_text()
    assert "floor on hits" in log
    assert "\x1b" not in log
    for parent, stage in zip((None, *STAGES), STAGES, strict=False):
        _, info = load_stage(finished.folder / stage)
        assert (info.stage, info.parent) == (stage, parent)
        assert (info.block_diffusion is None) == (stage == "ar_teacher")
    assert not list(finished.folder.parent.parent.glob("log*"))


def test_a_second_run_reuses_finished_stages(finished: Finished, here: Path) -> None:
    shutil.copytree(finished.folder, here / "again")
    (here / "again" / "run.log").unlink()
    weights = (here / "again" / "conversion" / "model.safetensors").stat()
    assert figures(run(here, run_dir=str(here / "again"))) == figures(finished.report)
    log = (here / "again" / "run.log").read_text()
    assert log.count("is finished and up to date, reused") == 4
    assert "epoch 0 training" not in log.replace("INFO epoch", "")  # the retriever is trained again
    assert (here / "again" / "conversion" / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns


def test_the_same_seed_gives_the_same_figures(finished: Finished, here: Path) -> None:
    assert figures(run(here)) == figures(finished.report)


def test_conversion_alone_starts_from_the_teacher_of_an_earlier_run(finished: Finished, here: Path) -> None:
    shutil.copytree(
        finished.folder, here / "again", ignore=shutil.ignore_patterns("conversion", "report.json")
    )
    report = run(here, run_dir=str(here / "again"), stages=["conversion"])
    assert tuple(models(report)) == ("retriever", "naive", "conversion")
    before = models(figures(finished.report))
    for name, row in models(figures(report)).items():
        assert row == before[name]
    without = run(here, run_dir=str(here / "again"), stages=["conversion"], naive_row=False)
    assert tuple(models(without)) == ("retriever", "conversion")
    with pytest.raises(ValueError, match="was trained on other data: its n_candidates is 6, here 5"):
        run(here, run_dir=str(here / "again"), stages=["conversion"], n_candidates=5)


def test_points_reach_the_reasoner_and_bind_later_stages(finished: Finished, here: Path) -> None:
    """A student fine-tuned on traces of other scores than its teacher's would learn a task of its own."""
    run(here, run_dir=str(here / "fine"), stages=[], points_per_unit=6)
    assert read_grounding(here / "fine" / GROUNDING_FILE)[1].points_per_unit == 6.0
    shutil.copytree(finished.folder, here / "again")
    message = r"points_per_unit is 6, but .* trained on scores of 3; set points_per_unit=3"
    for stages in (["conversion"], []):  # without stages the run would still write its own scores there
        with pytest.raises(ValueError, match=message):
            run(here, run_dir=str(here / "again"), stages=stages, points_per_unit=6)


def test_later_stages_alone_start_from_an_earlier_run(finished: Finished, here: Path) -> None:
    for first, stages, left in (
        ("reinforcement", ["reinforcement"], ()),
        ("without", ["distillation", "reinforcement"], ("reinforcement", "distillation")),
    ):
        shutil.copytree(finished.folder, here / first, ignore=shutil.ignore_patterns(*left, "report.json"))
        report = run(here, run_dir=str(here / first), stages=stages)
        before = models(figures(finished.report))
        assert tuple(models(report)) == ("retriever", *stages)
        assert models(figures(report)) == {name: before[name] for name in ("retriever", *stages)}
    shutil.copytree(
        finished.folder, here / "cft", ignore=shutil.ignore_patterns("distillation", "report.json")
    )
    run(here, run_dir=str(here / "cft"), stages=["reinforcement"])
    assert load_stage(here / "cft" / "reinforcement")[1].parent == "conversion"
    with pytest.raises(
        ValueError, match="block_size: the checkpoint was converted with 16 but 8 is asked for"
    ):
        run(here, run_dir=str(here / "cft"), stages=["reinforcement"], block_size=8)


def test_the_teacher_with_reinforcement_learning(here: Path) -> None:
    keys = {f"ar_teacher_rl_{name}": 2 for name in ("groups", "group_size")}
    report = run(here, stages=["ar_teacher", "conversion"], ar_teacher_rl_iterations=1, **keys)
    assert [row["name"] for row in report["rows"]][-4:] == [
        "ar_teacher",
        "ar_teacher_rl",
        "naive",
        "conversion",
    ]
    (folder,) = here.glob("saved/toy-*")
    assert load_stage(folder / "ar_teacher_rl")[1].parent == "ar_teacher"
    assert load_stage(folder / "conversion")[1].parent == "ar_teacher_rl"


def test_the_retriever_alone(finished: Finished, here: Path) -> None:
    report = run(here, stages=[])
    assert models(report) == {"retriever": models(finished.report)["retriever"]}


def test_a_prompt_and_a_retriever_of_ones_own(here: Path) -> None:
    """A sequential retriever, a prompt file by its path, and no item text at all."""
    shipped = ROOT / "properties" / "prompt" / "compact.yaml"
    (here / "own.yaml").write_text(shipped.read_text().replace("rank:", "order:"))
    keys = {"title_field": None, "category_field": None, "brand_field": None, "epochs": 1}
    small = {"embedding_size": 8, "hidden_size": 8, "ar_teacher_epochs": 0, "stages": ["ar_teacher"]}
    report = run(here, retriever="GRU4Rec", prompt=str(here / "own.yaml"), **keys, **small)
    assert report["retriever"] == "GRU4Rec"
    assert tuple(models(report)) == ("retriever", "ar_teacher")


# bad input
BAD: list[tuple[dict[str, Any], str]] = [
    ({"dataset": "toi"}, "no data set 'toi', expected .*the nearest known name is 'toy'"),
    ({"n_candidates": 81}, "n_candidates 81: the catalogue has 80 items, use at most that"),
    ({"topk": [10, 100], "valid_metric": "NDCG@10"}, "topk 100: the catalogue has 80 items"),
    ({"n_candidate": 5}, "the nearest known key is 'n_candidates'"),
    ({"tau": 0.0}, r"tau \(config_dict\): expected float in \(0, 1\], got 0.0"),
    ({"retriever": "ItemKN"}, "did you mean ItemKNN"),
    ({"retriever_checkpoint": "absent.pth"}, "absent.pth: no such file"),
    ({"title_field": "titel"}, "no column 'titel'.* the nearest is 'title'"),
    ({"prompt": "compct"}, "prompt 'compct': no file .*; did you mean compact"),
    ({"backbone": "./absent"}, "no folder './absent'"),
    (
        {"stages": ["conversion"]},
        "they start from the ar_teacher of an earlier run, and there is no .*ar_teacher",
    ),
    (
        {"stages": ["reinforcement"]},
        "start from the distillation or conversion of .*add ar_teacher, conversion, distillation to stages",
    ),
    (
        {"stages": ["ar_teacher", "distillation"]},
        "distillation starts from conversion, not from ar_teacher; add conversion",
    ),
    ({"embedded_max_positions": 64}, "the prompt has .* tokens without any history"),
    ({"embedded_vocab_size": 300, "n_candidates": 80}, "vocab_size must be >= 338"),
    ({"train_last_m": 1, "n_candidates": 2, "retriever": "Pop"}, "none of 60 training lists has its target"),
]


@pytest.mark.parametrize(
    "keys,message", BAD, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_bad_input_leaves_nothing_behind(here: Path, keys: dict[str, Any], message: str) -> None:
    given = {**TINY, "checkpoint_dir": "saved", **keys}
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        run_recbole_dgr2(dataset=given.pop("dataset", "toy"), config_dict=given)
    assert "\n" not in str(caught.value)
    assert list(here.iterdir()) == []


def test_a_folder_that_was_there_stays(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "note").write_text("x")
    with pytest.raises(ValueError, match="no folder"):
        run(here, run_dir="mine", backbone="./absent")
    assert (here / "mine" / "note").read_text() == "x"


@pytest.mark.slow
def test_the_command_line_is_quiet(here: Path) -> None:
    """A run in a process of its own: no warnings of libraries, no fragments of progress bars."""
    words = [
        f"--{key}={value}" for key, value in {**TINY, "stages": "[ar_teacher]", "run_dir": "out"}.items()
    ]
    command = [sys.executable, str(ROOT / "run_recbole_dgr2.py"), "--dataset=toy", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| ar_teacher +\| hits", done.stdout, flags=re.M)
    assert "Warning" not in done.stderr
    for line in done.stderr.splitlines():
        assert "%|" not in line
        assert "\x1b" not in line
    assert not list(here.glob("log*"))


def test_the_command_line_says_what_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset=toy", f"--data_path={ROOT / 'dataset'}", "--tauu=1"]) == 2
    assert capsys.readouterr().err.startswith("error: tauu (command line): ")
    assert main(["--dataset=toi"]) == 2
    assert "no data set 'toi'" in capsys.readouterr().err
    Path("taken").write_text("")
    assert main(["--dataset=toy", f"--data_path={ROOT / 'dataset'}", "--run_dir=taken/run"]) == 2
    assert "Not a directory: 'taken/run'" in capsys.readouterr().err.splitlines()[-1]


def test_answers_too_short_to_time_leave_the_speed_out(here: Path) -> None:
    report = run(here, stages=["ar_teacher"], max_new_tokens=1, n_drills=0)
    assert models(report)["ar_teacher"]["decode"] is None


def test_lists_shorter_than_n_give_no_drills(here: Path) -> None:
    """A candidate file with five candidates a user, at N = 6; the last three of each user's items are among them."""
    rows = ["user_id,item_id,split"]
    taken: dict[str, list[str]] = {}
    for line in (ROOT / "dataset" / "toy" / "toy.inter").read_text().splitlines()[1:]:
        user, item, _ = line.split("\t")
        taken.setdefault(user, []).append(item)
    for user, items in taken.items():
        rest = [f"i{number}" for number in range(1, 81) if f"i{number}" not in items]
        lists = [f"{user},{item}" for item in (*items[-3:], *rest[:2])]
        rows += [f"{line},{split}" for split in ("train", "valid", "test") for line in lists]
    (here / "lists.csv").write_text("\n".join(rows) + "\n")
    report = run(here, stages=["ar_teacher"], candidate_file=str(here / "lists.csv"))
    assert models(report)["ar_teacher"]["valid_rate"] is not None
