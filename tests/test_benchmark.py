"""The benchmark of retrievers: its JSON grows entry by entry, and its page is made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2 import benchmark, quick_start
from recbole_dgr2.benchmark import chosen_splits
from recbole_dgr2.data.parts import SPLITS
from recbole_dgr2.model.history import UserBoundError
from recbole_dgr2.report.benchmark_page import benchmark_page, markdown
from tests.atomic import walks, write


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a small benchmark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "WIDTHS", (2, 5))
    monkeypatch.setattr(benchmark, "SPLIT_WIDTH", 5)
    write(tmp_path, walks())
    keys = {"data_path": tmp_path, "topk": "[1,3,5]", "valid_metric": "NDCG@5", "bootstrap_samples": 100}
    keys |= {"threads": 1, "use_gpu": False, "show_progress": False, "train_last_m": 2, "epochs": 1}
    return ["--dataset=own", "--output=out/own.json", *(f"--{key}={value}" for key, value in keys.items())]


def test_it_is_collected_retriever_by_retriever(words: list[str]) -> None:
    assert benchmark.main([*words, "--retrievers=Pop"]) == 0
    assert benchmark.main([*words, "--retrievers=ItemKNN,SASRec", "--splits=ItemKNN"]) == 0
    content = json.loads(Path("out/own.json").read_text())
    assert list(content["retrievers"]) == ["Pop", "ItemKNN", "SASRec"]
    for name, entry in content["retrievers"].items():
        assert (entry["unmasked"] is None) == (name != "SASRec")
        assert entry["train_seconds"] > 0
        assert entry["widths"]["2"]["hits"] <= entry["widths"]["5"]["hits"]
        assert entry["widths"]["5"]["hit_share"] == pytest.approx(entry["metrics"]["recall@5"], abs=1e-4)
    splits = content["splits"]["ItemKNN"]
    assert list(splits) == ["last_m", "user_folds", "leaky"]
    assert {floor["split"] for floor in splits["leaky"]["floors"]} == {"leaky"}
    page = Path("out/own.md").read_text()
    for text in (
        "| Pop |",
        "SASRec, history not excluded",
        "| leaky | training |",
        "conditional_logit",
        "Machine: ",
    ):
        assert text in page
    assert page == benchmark_page(content)


def test_another_data_set_is_not_mixed_in(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/own.json").write_text('{"dataset": "other", "retrievers": {}}')
    assert benchmark.main([*words, "--retrievers=Pop"]) == 2
    assert "holds 'other', not 'own'" in capsys.readouterr().err


def test_a_retriever_that_cannot_be_folded_has_two_splits(words: list[str]) -> None:
    assert benchmark.main([*words, "--splits=BPR"]) == 0
    assert list(json.loads(Path("out/own.json").read_text())["splits"]["BPR"]) == ["last_m", "leaky"]


def report(mark: str) -> dict[str, Any]:
    """The report of a run, as far as the benchmark reads it."""
    kept = {"floors": [], "comparisons": [], "n_users": 1, "n_hits": 1, "phases": {}}
    return {**kept, "rows": [{"name": mark, "all": {}, "hits": {}, "ci95": {}}]}


@pytest.fixture
def runs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run under a split reports or raises, by split; set an entry to change it."""
    outcome: dict[str, Any] = {split: report(split) for split in SPLITS}

    def run(model: str, dataset: str, files: None, keys: dict[str, Any], words: list[str]) -> dict[str, Any]:
        found = outcome[keys["candidate_split"]]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(quick_start, "run_recbole_dgr2", run)
    return outcome


def marks() -> dict[str, str]:
    """The split and whose report stands under it."""
    splits = json.loads(Path("out/own.json").read_text())["splits"]["ItemKNN"]
    return {split: found["rows"][0]["name"] for split, found in splits.items()}


def test_one_split_measured_again_leaves_the_others(words: list[str], runs: dict[str, Any]) -> None:
    assert benchmark.main([*words, "--splits=ItemKNN:leaky"]) == 0
    assert benchmark.main([*words, "--splits=ItemKNN:last_m+user_folds"]) == 0
    runs["leaky"] = report("again")
    assert benchmark.main([*words, "--splits=ItemKNN:leaky"]) == 0
    assert list(marks().items()) == [("last_m", "last_m"), ("user_folds", "user_folds"), ("leaky", "again")]


def test_only_a_split_that_does_not_allow_the_retriever_is_left_out(
    words: list[str], runs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other error ends the command, and the figures in the file are the ones from before."""
    assert benchmark.main([*words, "--splits=ItemKNN"]) == 0
    before = Path("out/own.json").read_text()
    runs["last_m"], runs["leaky"] = report("new"), ValueError("no such thing")
    assert benchmark.main([*words, "--splits=ItemKNN"]) == 2
    assert capsys.readouterr().err == "error: no such thing\n"
    assert benchmark.main([*words, "--splits=ItemKNN", "--learning_rat=0.1"]) == 2
    assert "the nearest known key is 'learning_rate'" in capsys.readouterr().err
    runs["user_folds"] = UserBoundError("scores users by their id")
    assert benchmark.main([*words, "--splits=ItemKNN:user_folds"]) == 2
    assert capsys.readouterr().err == "error: scores users by their id\n"
    assert Path("out/own.json").read_text() == before
    assert benchmark.main([*words, "--splits=ItemKNN:last_m+user_folds"]) == 0
    assert marks() == {"last_m": "new", "user_folds": "user_folds", "leaky": "leaky"}


@pytest.mark.parametrize(
    "more,message",
    [
        (["--threads", "1"], "expected --key=value, got '--threads'"),
        (["--seed=1", "--seed=2"], "--seed is given twice"),
        (["--n_candidates=20"], "n_candidates (command line): the benchmark sets it itself (lists of 50"),
        (["--candidate_split=leaky"], "the benchmark sets it itself (name it in --splits"),
        (["--retriever=BPR"], "the benchmark sets it itself (name it in --retrievers or --splits)"),
        *([[f"--{key}=x"], f"{key} (command line)"] for key in sorted(benchmark.DECIDED)),
    ],
    ids=str,
)
def test_words_that_would_put_figures_under_a_wrong_name(
    words: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([*words, "--retrievers=Pop", "--splits=Pop", *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not Path("out").exists()


def test_shipped_hyper_parameters_are_known_to_recbole() -> None:
    own = benchmark.hyper_parameters("Amazon_Beauty")
    assert list(own) == ["Pop", "ItemKNN", "BPR", "LightGCN", "GRU4Rec", "SASRec"]
    assert benchmark.hyper_parameters("none") == {}


def test_a_page_of_nothing() -> None:
    assert benchmark_page({"dataset": "x"}).startswith("# x\n")
    assert markdown([["a", "b"], ["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


def test_the_page_names_the_studies_beside_it(tmp_path: Path) -> None:
    for name in ("own.json", "own_small.json", "own_small.md", "own_stages.md", "other_stages.md"):
        (tmp_path / name).write_text("{}")
    for name in ("own_stages.json", "own_unfinished.json"):
        (tmp_path / name).write_text(json.dumps({"entries": [], "speeds": [], "sample_seed": 1}))
    benchmark.Measurement("x", {}, tmp_path / "own.json").write_page({"dataset": "x"})
    links = [line for line in (tmp_path / "own.md").read_text().splitlines() if line.startswith("- [")]
    assert links == ["- [own_stages.md](own_stages.md)"]


def test_splits_are_all_or_some() -> None:
    assert chosen_splits("ItemKNN") == ("ItemKNN", SPLITS)
    assert chosen_splits("SASRec:last_m+leaky") == ("SASRec", ("last_m", "leaky"))
    with pytest.raises(
        ValueError, match="--splits 'SASRec:lastm': 'lastm' is none of last_m, user_folds, leaky"
    ):
        chosen_splits("SASRec:lastm")
