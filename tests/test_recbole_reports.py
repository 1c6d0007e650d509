"""What users of RecBole and of its relatives have reported, as far as it touches candidates, evaluation and loading.

Each test names the issue it is taken from (github.com/RUCAIBox/RecBole/issues/<number> unless another repository is
named). Reports that other files test are not repeated here: item text #2017, #2125 and ragged lists #1086 (bad input,
candidate files), checkpoints #924, #2212 (compat), ties #2198 (candidates), names #2172 (config).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.config import Config
from recbole_dgr2.data.candidates import HeadOptions, build_candidates
from recbole_dgr2.data.sequences import Sequences, leave_one_out_rows
from recbole_dgr2.model.retriever import train_retriever
from recbole_dgr2.pipeline.open_run import open_run
from recbole_dgr2.report.tables import render_markdown
from recbole_dgr2.utils import (
    build_trainer,
    load_dataset,
    recbole_metrics,
    sequences_from_dataset,
    split_loaders,
)
from tests.atomic import Interaction, run, walks, write
from tests.recsys import recbole_config, write_interactions
from tests.reranking import sequences

FIGURES = ("n_users", "n_hits", "rows", "floors", "comparisons")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def figures(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in FIGURES}


@pytest.mark.parametrize("name", ["Pop", "BPR", "SASRec"])
def test_2129_any_recommender_by_name(tmp_path: Path, name: str) -> None:
    keys = {"embedding_size": 8} if name == "BPR" else {}
    if name == "SASRec":
        keys = {"hidden_size": 8, "inner_size": 8, "n_layers": 1, "n_heads": 1}
    report = run(write(tmp_path, walks()), retriever=name, epochs=1, **keys)
    assert report["retriever"] == name
    assert report["rows"][0]["name"] == "retriever"


def test_1401_and_1609_lists_from_outside_by_recboles_formulas(tmp_path: Path) -> None:
    asked = {"topk": [1, 3], "valid_metric": "NDCG@3", "metrics": ["Recall", "NDCG", "MRR"]}
    config = recbole_config("Pop", write_interactions(tmp_path, [6] * 8, 20), **asked)
    lists = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6]])
    found = recbole_metrics(config, load_dataset(config), lists, torch.tensor([4, 6, 9, 5]))
    assert found["recall@1"] == 0.25
    assert found["recall@3"] == 0.75
    assert found["mrr@3"] == pytest.approx((1 + 1 / 3 + 1 / 2) / 4, abs=1e-4)
    assert found["ndcg@3"] == pytest.approx((1 + 1 / 2 + 1 / np.log2(3)) / 4, abs=1e-4)


def test_1074_a_model_without_its_training_data_loader(tmp_path: Path) -> None:
    run(write(tmp_path, walks()))
    (entry,) = open_run(tmp_path / "saved" / "own-ItemKNN-2020").recommend(["u3"], "retriever")
    assert entry.status == "ok"


def test_1449_and_1823_the_history_is_masked_as_asked(tmp_path: Path) -> None:
    rows = [*walks(), *((f"r{n}", f"i{n}", t) for n in range(6) for t in range(6))]  # they repeat one item
    folder = write(tmp_path, rows)
    masked = run(folder, retriever="SASRec", epochs=1, run_dir="a")
    assert masked["n_users"] == 18
    run(folder, retriever="SASRec", epochs=1, run_dir="b", mask_history=False)
    users = [f"r{n}" for n in range(6)]
    for folder_name, shown in (("a", False), ("b", True)):
        lists = open_run(folder_name).recommend(users, "retriever")
        assert any(f"i{n}" in entry.items for n, entry in enumerate(lists)) == shown


def test_1556_and_1878_the_batch_size_changes_no_figure(tmp_path: Path) -> None:
    folder = write(tmp_path, walks())
    reports = [figures(run(folder, eval_batch_size=size, cache_dir=None)) for size in (1, 4096)]
    assert reports[0] == reports[1]


def test_704_and_1298_a_very_long_history(tmp_path: Path) -> None:
    """No row of a training list holds a history: they are views of one array."""
    rng = np.random.default_rng(0)
    long: list[Interaction] = [
        ("long", f"i{n}", t) for t, n in enumerate(rng.integers(0, 20, size=3000).tolist())
    ]
    report = run(write(tmp_path, walks(items=40) + long), n_candidates=5, train_last_m=500)
    assert report["floors"][0]["lists"] == 12 * 4 + 500
    data = Sequences(2, 30, np.array([0, 0, 3000]), rng.integers(1, 30, size=3000))
    rows = leave_one_out_rows(data, "train", 2900)
    assert all(np.shares_memory(history, data.items) for history in rows.histories(data))


def test_701_an_item_that_is_only_in_the_test_rows(tmp_path: Path) -> None:
    rows = [*walks(), ("u1", "cold", 10**6)]
    report = run(write(tmp_path, rows))
    assert report["n_users"] == 12


def test_2082_a_title_column_beside_a_sequential_model(tmp_path: Path) -> None:
    lines = ["item_id:token\ttitle:token_seq", *(f"i{n}\ta title of {n}" for n in range(20))]
    load = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "title"]}
    report = run(
        write(tmp_path, walks(), lines), retriever="SASRec", epochs=1, title_field="title", load_col=load
    )
    assert report["retriever"] == "SASRec"


def test_2131_metrics_of_coverage_and_popularity(tmp_path: Path) -> None:
    metrics = ["Recall", "NDCG", "MRR", "ItemCoverage", "GiniIndex", "TailPercentage"]
    assert run(write(tmp_path, walks()), metrics=metrics)["n_users"] == 12


@pytest.mark.parametrize("name", ["Pop", "ItemKNN", "SASRec"])
def test_1196_the_retrievers_row_is_recboles_own_evaluation(tmp_path: Path, name: str) -> None:
    """Figures of this run equal what RecBole's Trainer says of the same weights, to the last digit."""
    folder = write_interactions(tmp_path, [5, 6, 7, 8] * 5, 30)
    mask = name != "SASRec"  # RecBole masks the history of general models only
    config = recbole_config(name, folder, epochs=1)
    dataset = load_dataset(config)
    retriever = train_retriever(config, dataset, tmp_path / "retriever")
    train, _, test = split_loaders(config, dataset)
    trainer = build_trainer(config, retriever.model)
    trainer.eval_collector.data_collect(train)
    own = dict(trainer.evaluate(test, load_best_model=False))
    data = sequences_from_dataset(dataset)
    rows = leave_one_out_rows(data, "test")
    lists = build_candidates(retriever.score, rows, data, HeadOptions(10, max(config["topk"]), mask))
    ours = recbole_metrics(config, train, torch.from_numpy(lists.ids), torch.from_numpy(rows.targets(data)))
    assert ours == own


def test_1602_and_1697_changed_files_are_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path, walks())
    before = run(folder)
    again = run(folder)
    assert figures(again) == figures(before)
    write(tmp_path, walks(users=15))
    assert run(folder)["n_users"] == 15


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), last_m=st.integers(1, 9))
def test_1649_no_training_row_holds_a_later_target(lengths: list[int], last_m: int) -> None:
    items = iter(range(1, 1000))
    data = sequences(*[[next(items) for _ in range(length)] for length in lengths], n_items=1000)
    train = leave_one_out_rows(data, "train", last_m)
    seen = {item for history in train.histories(data) for item in history.tolist()}
    seen |= set(train.targets(data).tolist())
    for phase in ("valid", "test"):
        rows = leave_one_out_rows(data, phase)  # type: ignore[arg-type]
        long = (
            data.lengths[rows.users] >= 4
        )  # of three items the second is trained on: there is no validation row
        assert not seen & set(rows.targets(data)[long].tolist())


@pytest.mark.parametrize("mode", ["uni100", "pop100", "labeled"])
def test_1785_sampled_evaluation_is_refused(tmp_path: Path, mode: str) -> None:
    protocol = {"split": {"LS": "valid_and_test"}, "order": "TO", "group_by": "user", "mode": mode}
    with pytest.raises(ValueError, match="eval_args: the re-ranker ranks leave-one-out lists"):
        run(write(tmp_path, walks()), eval_args=protocol)


def test_1536_the_name_of_beauty(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the nearest known name is 'amazon-beauty'"):
        Config(dataset="Amazon_Beauty", config_dict={"data_path": str(tmp_path)})


def test_llamarec_1_both_views_and_the_ceiling(tmp_path: Path) -> None:
    """Over all users and over hits, with the share of hits that no re-ranking can pass (mem0ai/mem0 #6448)."""
    report = run(write(tmp_path, walks()))
    row = report["rows"][0]
    share = report["n_hits"] / report["n_users"]
    assert row["all"]["recall@5"] == pytest.approx(share, abs=1e-4)
    assert row["hits"]["recall@5"] == 1.0
    assert f"ceiling recall@5 = {share:.4f}" in render_markdown(report)
    assert {"ndcg@3", "ndcg@5"} <= set(row["all"])  # order-sensitive (vitali87/code-graph-rag #1474)


def test_1933_benchmark_files(tmp_path: Path) -> None:
    """Ready-made splits are another protocol than the one that lists are cut by: refused, not mixed."""
    folder = write(tmp_path, walks())
    for part in ("train", "valid", "test"):
        (folder / "own" / f"own.{part}.inter").write_text((folder / "own" / "own.inter").read_text())
    with pytest.raises(ValueError, match="benchmark_filename"):
        run(folder, benchmark_filename=["train", "valid", "test"])


def test_the_data_folder_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one", walks())
    write(tmp_path / "two", walks())
    monkeypatch.setenv("RECBOLE_DGR2_DATA", str(tmp_path / "one"))
    assert Path(Config(dataset="own")["data_path"]) == tmp_path / "one" / "own"
    given = Config(dataset="own", arguments=[f"--data_path={tmp_path / 'two'}"])
    assert Path(given["data_path"]) == tmp_path / "two" / "own"


def test_leaky_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report = run(write(tmp_path, walks()), candidate_split="leaky")
    assert "candidate_split leaky: the retriever and the facts of the training lists" in caplog.text
    assert {floor["split"] for floor in report["floors"]} == {"leaky"}
    assert "for comparison only" in render_markdown(report)
    content = json.loads((tmp_path / "saved" / "own-ItemKNN-2020" / "report.json").read_text())
    assert content["floors"] == report["floors"]


def test_user_folds_name_who_can(tmp_path: Path) -> None:
    folder = write(tmp_path, walks())
    assert run(folder, candidate_split="user_folds", n_folds=3)["floors"][0]["split"] == "user_folds"
    with pytest.raises(ValueError, match=r"user_folds: BPR scores users by their id.*SASRec"):
        run(folder, candidate_split="user_folds", retriever="BPR", embedding_size=8, epochs=1)
