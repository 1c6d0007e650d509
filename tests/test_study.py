"""Stages over seeds: what is decoded, what is kept, what is refused, and the figures by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2 import study
from recbole_dgr2.pipeline import study_decoding
from recbole_dgr2.pipeline.rank_files import RANKS_FILE, lists_digest
from recbole_dgr2.pipeline.study_file import compact_json
from recbole_dgr2.pipeline.study_members import RunLists, require_same_lists
from recbole_dgr2.report.significance import paired_test
from recbole_dgr2.report.study_figures import Study
from recbole_dgr2.report.study_page import study_page
from recbole_dgr2.report.study_plot import validity_lines, write_plot
from tests.toy_run import Finished

ABOUT = {
    "dataset": "toy",
    "retriever": "ItemKNN",
    "runs": ["a", "b"],
    "seeds": [1, 2],
    "n_candidates": 4,
    "n_users": 8,
    "n_hits": 4,
    "sample": 4,
    "sample_seed": 1,
    "batch": 64,
    "timed": 2,
    "options": {"epochs": 3},
    "variant_options": {"no drills": {"n_drills": 0}},
    "command": "python -m recbole_dgr2.study --runs=a,b",
    "hardware": "a machine",
    "versions": {"python": "3"},
}


def entry(name: str, seed: int, ranks: str, decoder: str = "none", **more: Any) -> dict[str, Any]:
    valid = {"answers": 4, "valid": 3, "failures": {"duplicate": 1}} if decoder != "none" else None
    made = {
        "name": name,
        "seed": seed,
        "decoder": decoder,
        "ranks": ranks,
        "rows": None,
        "all": {"recall@1": 0.5},
    }
    made |= {"weights": f"{name} {seed}" if valid else None}
    made |= {"valid": valid, "hits_valid": valid, "copied": 0.5, "tokens_per_pass": 2.0, "acceptance": None}
    return {**made, "equal_to_ar": None, "seconds": 7.0, "teacher": "ar_teacher", "varies": None, **more}


def content() -> dict[str, Any]:
    """Two seeds on 4 hits: the floor has R@1 .25, the teacher .5 and 1, the conversion .5 and .75."""
    students = {"decoder": "block 0.9"}
    entries = [
        *(entry("retriever", seed, "0 1 2 3") for seed in (1, 2)),
        entry("ar_teacher", 1, "0 0 2 3", "autoregressive"),
        entry("ar_teacher", 2, "0 0 0 0", "autoregressive"),
        entry("conversion", 1, "0 0 2 3", **students),
        entry("conversion", 2, "0 0 0 1", **students),
        entry("naive", 1, "1 3", rows="1 3", **students),
        entry("no drills", 2, "0 0 0 0", **students, varies="conversion"),
    ]
    speeds = [
        {"name": "conversion", "seed": seed, "decoders": {"block 0.9": {"speedup": float(seed)}}}
        for seed in (1, 2)
    ]
    return {**ABOUT, "entries": entries, "speeds": speeds}


def test_lift_and_paired_difference_by_hand() -> None:
    made = Study(content())
    row = made.row("conversion")
    assert row is not None
    assert row.by_seed("recall@1") == [0.5, 0.75]
    # floor .25, teacher (.5 + 1) / 2 = .75, conversion .625
    assert made.lift_share(row) == pytest.approx((0.625 - 0.25) / (0.75 - 0.25))
    found = made.test("conversion", "ar_teacher", "recall@1")
    assert found is not None
    users = np.array([1.0, 1.0, 0.5, 0.0]), np.array([1.0, 1.0, 0.5, 0.5])  # means over both seeds
    assert found == (paired_test(*users, 2000, 1), 4, 2)
    assert found[0].difference == pytest.approx(-0.125)
    assert row.speedup() == 1.5
    assert row.valid() is not None and row.valid()[0] == 0.75  # type: ignore[index]


def test_fewer_seeds_and_fewer_hits_are_compared_on_what_is_shared() -> None:
    made = Study(content())
    found = made.test("no drills", "conversion", "recall@1")
    assert found is not None
    assert (found[0].difference, found[1], found[2]) == (0.25, 4, 1)  # seed 2 alone
    row = made.row("naive")
    assert row is not None and row.rows.tolist() == [1, 3]
    assert row.by_seed("recall@1") == [0.0]
    assert made.lift_share(row) == pytest.approx(0.0)  # the floor has neither of the two first
    assert ("no drills", "conversion") in made.pairs() and ("conversion", "retriever") in made.pairs()
    assert len(set(made.pairs())) == len(made.pairs())


def test_page_by_hand() -> None:
    page = study_page(content())
    assert "| conversion | 2 | block 0.9 | 0.6250 (0.5000 to 0.7500) |" in page
    assert "- no drills: 1 of 2 seeds." in page and "the same weights as" not in page
    same = {
        "entries": [
            {**one, "weights": "w" * one["decoder"].startswith("block")} for one in content()["entries"]
        ]
    }
    assert "- no drills, seed 2: the same weights as conversion." in study_page({**content(), **same})
    assert "- naive: decoded for the random users alone, 2 of them hits" in page
    assert "| ar_teacher | 0.2960 | 0.7500 |" in page  # the paper's beside ours
    tuned = [entry("ar_teacher_rl", 1, "0 0 0 3", "autoregressive")]
    grown = [{**one, "teacher": "ar_teacher_rl"} for one in content()["entries"]]
    other = study_page({**content(), "entries": [*grown, *tuned]})
    assert "| ar_teacher (ours: ar_teacher_rl) | 0.2960 | 0.7500 |" in other
    assert "- no drills: `n_drills: 0`." in page
    assert "python -m recbole_dgr2.study --runs=a,b" in page and "`epochs: 3`" in page


def test_plot_has_a_line_a_student_of_several_thresholds(tmp_path: Path) -> None:
    assert write_plot(content(), tmp_path / "none.png") is None and not list(tmp_path.iterdir())
    more = [
        {**entry("conversion", seed, "0 0 2 3", f"block {tau}"), "tokens_per_pass": tokens}
        for seed in (1, 2)
        for tau, tokens in (("0.4", 6.0), ("1", 1.0), ("0.6", 3.0 + seed))
    ]
    entries = [*content()["entries"], *more]
    (line,) = validity_lines({**content(), "entries": entries})
    assert line.name == "conversion" and line.taus == ("0.9", "0.6", "0.4")
    assert line.tokens == (2.0, 4.5, 6.0) and line.valid == (0.75, 0.75, 0.75)
    plot = write_plot({**content(), "entries": entries}, tmp_path / "plot.png")
    assert plot is not None and plot.stat().st_size > 1000
    assert "](plot.png)" in study_page(content(), plot.name) and "](" not in study_page(content())


def test_json_has_a_line_an_entry() -> None:
    text = compact_json(content())
    assert json.loads(text) == content()
    assert len(text.splitlines()) == len(ABOUT) + 2 + 2 * 2 - 2 + 8 + 2 + 2


@pytest.fixture
def runs(finished: Finished, tmp_path: Path) -> list[Path]:
    """Two finished runs of different seeds, with the same weights."""
    folders = [tmp_path / "s2020", tmp_path / "s2021"]
    for folder in folders:
        shutil.copytree(finished.folder, folder)
        for stage in ("distillation", "reinforcement"):
            shutil.rmtree(folder / stage)
    change(folders[1], seed=2021, retriever_seed=2020)
    return folders


def change(folder: Path, **options: Any) -> None:
    path = folder / "run.json"
    saved = json.loads(path.read_text())
    saved["options"] |= options
    path.write_text(json.dumps(saved))


def call(runs: list[Path], output: Path, *more: str) -> int:
    given = [f"--runs={','.join(map(str, runs))}", f"--output={output}", "--users=8", "--timed=2"]
    return study.main([*given, "--threads=1", "--taus=0.5", *more])


def test_command_decodes_once_and_renders(
    runs: list[Path],
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(study_decoding, "ROUNDS", 1)
    output = tmp_path / "results" / "stages.json"
    extra = ["--variants", f"again={runs[1]}:conversion"]
    assert call(runs, output, *extra) == 0
    page = output.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out
    made = json.loads(output.read_text())
    found = {(e["name"], e["seed"], e["decoder"]): e for e in made["entries"]}
    ways = ["autoregressive", "block 0.9", "block 0.5", "speculative"]
    assert {key for key in found if key[0] == "conversion"} == {
        ("conversion", s, w) for s in (2020, 2021) for w in ways
    }
    assert found["conversion", 2020, "speculative"]["equal_to_ar"] == 1.0
    assert found["naive", 2020, "block 0.9"]["valid"]["answers"] == 8
    # what the run's own report says of the same weights, decoded the same way
    for name, decoder in (
        ("ar_teacher", "autoregressive"),
        ("conversion", "block 0.9"),
        ("retriever", "none"),
    ):
        (row,) = [row for row in finished.report["rows"] if row["name"] == name]
        assert found[name, 2020, decoder]["hits"] == row["hits"]
        for metric, value in row["all"].items():
            assert found[name, 2020, decoder]["all"][metric] == pytest.approx(value, abs=5.1e-5)
    assert made["variant_options"] == {"again": {}}
    # nothing is decoded a second time
    monkeypatch.setattr(study_decoding.Bank, "entry", None)
    monkeypatch.setattr(study_decoding.Bank, "speed", None)
    assert call(runs, output, *extra) == 0
    again = json.loads(output.read_text())
    assert sorted(map(str, again["entries"])) == sorted(map(str, made["entries"]))
    assert again["speeds"] == made["speeds"]
    output.with_suffix(".md").unlink()
    assert study.main([f"--output={output}", "--render"]) == 0
    assert output.with_suffix(".md").read_text() == page
    assert study.main([f"--output={output}", "--render", "--users=7"]) == 2
    assert "expected --output and no --users" in capsys.readouterr().err
    capsys.readouterr()
    assert call(runs, output, "--users=7") == 2
    assert "made with sample 8, now 7; give another --output" in capsys.readouterr().err
    # what took hours to decode is not dropped by a call that forgets it
    assert call(runs, output) == 2 and call(runs[:1], output) == 2
    error = capsys.readouterr().err.splitlines()
    assert "holds again of seed 2021, which this call leaves out" in error[0] and "of seed 2021" in error[1]
    assert json.loads(output.read_text())["entries"] == again["entries"]
    assert call(runs, output, *extra, "--timed=0") == 0
    assert json.loads(output.read_text())["timed"] == 2  # of the speeds that are there still


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2020}, "expected runs that differ in their seed"),
        ({"n_candidates": 5}, "s2021: n_candidates is 5, but 6 in"),
        ({"max_new_tokens": 50}, "s2021: max_new_tokens is 50, but 40 in"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    runs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    message: str,
) -> None:
    change(runs[1], **options)
    assert call(runs, tmp_path / "x.json") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "x.json").exists()


def test_a_run_without_its_ranks_is_to_be_run_again(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs[1] / RANKS_FILE).unlink()
    assert call(runs, tmp_path / "x.json") == 2
    error = capsys.readouterr().err
    assert f"run {runs[1]} again with this version, which reuses its finished stages" in error


def test_other_candidates_name_the_key(finished: Finished) -> None:
    test = finished.setting.test
    one = RunLists(test, lists_digest(test.candidates.ids, test.targets))
    other = replace(one, digest="other")
    config = finished.setting.config
    changed = {**{key: config[key] for key in config.given}, "retriever_seed": 7}

    class Changed(dict[str, Any]):
        def __missing__(self, key: str) -> Any:
            return config[key]

    require_same_lists((config, one), (config, one), Path("run"))
    with pytest.raises(
        ValueError, match="run: other test candidates than those of the first run; retriever_seed is 7"
    ):
        require_same_lists((config, one), (Changed(changed), other), Path("run"))  # type: ignore[arg-type]
