"""The retriever's own config: RecBole's, with our split and metrics, and the retriever's keys passed through."""

from __future__ import annotations

from pathlib import Path

import pytest
from recbole.config import Config as RecBoleConfig
from recbole.utils import InputType

from recbole_dgr2.config import Config, retriever_class, retriever_config, retriever_names
from recbole_dgr2.pipeline.views import candidate_options
from tests.toy_run import ROOT, Build

LEAVE_ONE_OUT = {"split": {"LS": "valid_and_test"}, "order": "TO", "group_by": "user"}


def test_retriever_names_are_recbole_classes() -> None:
    names = retriever_names()
    for name in ("Pop", "ItemKNN", "BPR", "LightGCN", "GRU4Rec", "SASRec", "BERT4Rec"):
        assert name in names
        assert retriever_class(name).__name__ == name
    assert "FM" not in names


@pytest.mark.parametrize("name", ["Pop", "ItemKNN", "BPR", "LightGCN", "GRU4Rec", "SASRec", "BERT4Rec"])
def test_retriever_config(toy_config: Build, name: str) -> None:
    host = retriever_config(toy_config(retriever=name))
    assert type(host) is RecBoleConfig
    assert host["model"] == name
    assert host["eval_args"] == {**LEAVE_ONE_OUT, "mode": {"valid": "full", "test": "full"}}
    assert host["topk"] == [1, 3, 5, 10]
    assert host["valid_metric"] == "NDCG@10"
    assert host["load_col"] == {"inter": ["user_id", "item_id", "timestamp"]}
    sampled = host["train_neg_sample_args"]["distribution"]
    assert sampled == ("none" if name in ("GRU4Rec", "SASRec", "BERT4Rec") else "uniform")
    assert "n_candidates" not in host


def test_retriever_keys_pass_through(toy_config: Build) -> None:
    config = toy_config(retriever="SASRec", n_layers=1, loss_type="BPR", MAX_ITEM_LIST_LENGTH=7)
    host = retriever_config(config, epochs=3)
    assert (host["n_layers"], host["MAX_ITEM_LIST_LENGTH"], host["epochs"]) == (1, 7, 3)
    assert host["train_neg_sample_args"]["distribution"] == "uniform"
    assert host["MODEL_INPUT_TYPE"] == InputType.PAIRWISE
    assert config["epochs"] == 1
    assert Path(host["data_path"]) == ROOT / "dataset" / "toy"


def test_the_retriever_has_a_seed_of_its_own(toy_config: Build) -> None:
    """Language models of other seeds share its candidates: the folds of users must not move either."""
    for keys, seed in (({"seed": 7}, 7), ({"seed": 7, "retriever_seed": 0}, 0)):
        config = toy_config(**keys)
        assert retriever_config(config)["seed"] == candidate_options(config).split.seed == seed
        assert config["seed"] == 7


def test_ml_100k_ships_with_recbole() -> None:
    config = Config(dataset="ml-100k")
    assert config["title_field"] == "movie_title"
    assert retriever_config(config)["load_col"] == config["load_col"]
