"""Retrievers and lists between runs: what is trained, what is found again, and what is not trusted."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from recbole_dgr2.pipeline import retrieval
from tests.atomic import run, walks, write

SMALL = {"retriever": "SASRec", "epochs": 1, "hidden_size": 8, "inner_size": 8, "n_layers": 1, "n_heads": 1}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the training functions that were called."""
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []

    def watch(name: str) -> None:
        original = getattr(retrieval, name)

        def call(*values: Any) -> Any:
            calls.append(name)
            return original(*values)

        monkeypatch.setattr(retrieval, name, call)

    for name in ("train_retriever", "train_part_retriever"):
        watch(name)
    return calls


def figures(report: dict[str, Any]) -> Any:
    return report["rows"], report["floors"], report["comparisons"]


def test_a_second_run_trains_nothing(tmp_path: Path, trained: list[str]) -> None:
    folder = write(tmp_path, walks())
    first = run(folder, **SMALL)
    assert trained == ["train_retriever", "train_part_retriever"]
    assert figures(run(folder, **SMALL)) == figures(first)
    assert len(trained) == 2
    shutil.copytree(folder / "own", tmp_path / "moved" / "own")
    assert figures(run(tmp_path / "moved", **SMALL, cache_dir=str(folder / "saved" / "cache"))) == figures(
        first
    )
    assert len(trained) == 2  # the content of the files counts, not their place


@pytest.mark.parametrize(
    "change,again",
    [
        ({"n_candidates": 4}, 0),
        ({"bootstrap_samples": 150}, 0),
        ({"topk": [1, 3, 5, 8]}, 0),
        ({"train_last_m": 1}, 1),
        ({"candidate_split": "leaky"}, 0),
        ({"candidate_split": "user_folds", "n_folds": 2}, 2),
        ({"seed": 3}, 2),
        ({"hidden_size": 4}, 2),
        ({"learning_rate": 0.01}, 2),
        ({"eval_batch_size": 64}, 0),
        ({"eval_step": 0}, 2),
        ({"valid_metric": "NDCG@3"}, 2),
        ({"metric_decimal_place": 2}, 2),
    ],
    ids=str,
)
def test_what_is_trained_again(
    tmp_path: Path, trained: list[str], change: dict[str, Any], again: int
) -> None:
    """Retrievers are reused over candidate options, lists only where nothing that decides them has changed."""
    folder = write(tmp_path, walks())
    run(folder, **SMALL)
    trained.clear()
    run(folder, **{**SMALL, **change})
    assert len(trained) == again


def test_damaged_entries_are_made_again(
    tmp_path: Path, trained: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, walks())
    first = run(folder, **SMALL)
    cache = folder / "saved" / "cache"
    for path in [*cache.glob("*.parquet"), *cache.glob("*/retriever.pth")]:
        shutil.copy(path, tmp_path / "copy")  # the run's folder holds a link to the checkpoint
        path.unlink()
        path.write_bytes((tmp_path / "copy").read_bytes()[:-100])
    trained.clear()
    with caplog.at_level(logging.WARNING):
        assert figures(run(folder, **SMALL)) == figures(first)
    assert trained == ["train_retriever", "train_part_retriever"]
    assert caplog.text.count("is damaged (its checksum differs); it is built again") == 6 + 2


def test_lists_are_columns_that_pandas_reads(tmp_path: Path, trained: list[str]) -> None:
    report = run(write(tmp_path, walks()))
    (path,) = (tmp_path / "saved" / "cache").glob("candidates-test-*.parquet")
    table = pd.read_parquet(path)
    assert list(table.columns) == ["user", "end", "slot", "item", "score"]
    assert len(table) == report["n_users"] * 5
    (path,) = (tmp_path / "saved" / "cache").glob("facts-train-*.parquet")
    assert {"match", "popular", "together"} <= set(pd.read_parquet(path).columns)


def test_without_a_cache_nothing_is_kept(tmp_path: Path, trained: list[str]) -> None:
    folder = write(tmp_path, walks())
    first = run(folder, cache_dir=None)
    assert figures(run(folder, cache_dir=None)) == figures(first)
    assert trained.count("train_retriever") == 2
    assert not (folder / "saved" / "cache").exists()
    assert (folder / "saved" / "own-ItemKNN-2020" / "retriever" / "retriever.pth").exists()


def test_a_runs_own_file_given_to_it_again_stays(tmp_path: Path, trained: list[str]) -> None:
    """`--retriever_checkpoint` and `--candidate_file` out of the folder that the run goes to."""
    folder = write(tmp_path, walks())
    run(folder, run_dir="one")
    checkpoint = Path("one/retriever/retriever.pth")
    content = checkpoint.read_bytes()
    run(folder, run_dir="one", retriever_checkpoint=str(checkpoint))
    assert checkpoint.read_bytes() == content
    lists = Path("two/retriever/lists.csv")
    lists.parent.mkdir(parents=True)
    lists.write_text("user_id,item_id\n" + "".join(f"u{n},i{(3 * n + 6) % 20}\n" for n in range(12)))
    text = lists.read_text()
    run(folder, run_dir="two", candidate_file=str(lists))
    assert lists.read_text() == text
    Path("lists.csv").write_text(text)
    Path("given.pth").write_bytes(content)
    run(folder, run_dir="three", candidate_file="lists.csv")
    run(folder, run_dir="four", retriever_checkpoint="given.pth")
    for given, kept in (
        ("lists.csv", "three/retriever/lists.csv"),
        ("given.pth", "four/retriever/retriever.pth"),
    ):
        assert not Path(given).samefile(kept)
        assert Path(given).read_bytes() == Path(kept).read_bytes()
