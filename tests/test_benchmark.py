"""The benchmark of retrievers: its JSON grows entry by entry, and its page is made from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recbole_dgr2 import benchmark
from recbole_dgr2.benchmark import chosen_splits
from recbole_dgr2.data.parts import SPLITS
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
    Path("out/own.json").write_text('{"dataset": "other"}')
    assert benchmark.main([*words, "--retrievers=Pop"]) == 2
    assert "holds 'other', not 'own'" in capsys.readouterr().err


def test_a_retriever_that_cannot_be_folded_has_two_splits(words: list[str]) -> None:
    assert benchmark.main([*words, "--splits=BPR"]) == 0
    assert list(json.loads(Path("out/own.json").read_text())["splits"]["BPR"]) == ["last_m", "leaky"]


def test_shipped_hyper_parameters_are_known_to_recbole() -> None:
    own = benchmark.hyper_parameters("Amazon_Beauty")
    assert list(own) == ["Pop", "ItemKNN", "BPR", "LightGCN", "GRU4Rec", "SASRec"]
    assert benchmark.hyper_parameters("none") == {}


def test_a_page_of_nothing() -> None:
    assert benchmark_page({"dataset": "x"}).startswith("# x\n")
    assert markdown([["a", "b"], ["1", "2"]]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


def test_splits_are_all_or_some() -> None:
    assert chosen_splits("ItemKNN") == ("ItemKNN", SPLITS)
    assert chosen_splits("SASRec:last_m+leaky") == ("SASRec", ("last_m", "leaky"))
    with pytest.raises(
        ValueError, match="--splits 'SASRec:lastm': 'lastm' is none of last_m, user_folds, leaky"
    ):
        chosen_splits("SASRec:lastm")
