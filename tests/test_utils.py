"""Data sets and metrics of lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recbole.data import data_preparation
from recbole.evaluator.collector import DataStruct

from recbole_dgr2.utils import (
    item_tokens,
    load_dataset,
    recbole_metrics,
    sequences_from_dataset,
    split_loaders,
)
from tests.recsys import recbole_config, run_config, write_interactions


def test_metrics_by_hand(tmp_path: Path) -> None:
    config = run_config("Pop", write_interactions(tmp_path, [6] * 6, 20), topk=[1, 2], valid_metric="MRR@2")
    config["metrics"] = ["Recall", "MRR"]
    ranked = torch.tensor([[4, 5, 9], [6, 7, 9], [8, 2, 3]])
    found = recbole_metrics(config, DataStruct(), ranked, torch.tensor([4, 7, 3]))
    assert found == {"recall@1": 0.3333, "recall@2": 0.6667, "mrr@1": 0.3333, "mrr@2": 0.5}
    with pytest.raises(ValueError, match=r"ranked: expected \[3, >= 2\] ids for topk \[1, 2\], got \[3, 1\]"):
        recbole_metrics(config, DataStruct(), ranked[:, :1], torch.tensor([4, 7, 3]))


def test_item_tokens(tmp_path: Path) -> None:
    dataset = load_dataset(run_config("Pop", write_interactions(tmp_path, [6] * 6, 20)))
    tokens = item_tokens(dataset)
    assert tokens[0] == "[PAD]"
    assert len(tokens) == dataset.item_num
    assert dataset.token2id("item_id", tokens[3]) == 3


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """RecBole would take its pickled copy, whose arguments are the same (RecBole #1602, #1697)."""
    config = run_config("Pop", write_interactions(tmp_path, [6] * 6, 20))
    dataset = load_dataset(config)
    dataset.save()
    assert list((tmp_path / "saved").iterdir())
    file = tmp_path / "small" / "small.inter"
    file.write_text(file.read_text() + "u0\tnew\t5\t1500000000\n")
    again = load_dataset(config)
    assert len(again.inter_feat) == len(dataset.inter_feat) + 1
    assert item_tokens(again)[sequences_from_dataset(again).of(again.token2id("user_id", "u0"))[-1]] == "new"


@pytest.mark.parametrize("retriever", ["BPR", "SASRec"])
def test_loaders_are_recboles_and_the_data_set_stays(retriever: str, tmp_path: Path) -> None:
    config = recbole_config(retriever, write_interactions(tmp_path, [2, 3, 4, 9, 12], 30))
    dataset = load_dataset(config)
    before = dataset.inter_feat.copy()
    ours = split_loaders(config, dataset)
    assert dataset.inter_feat.equals(before)
    theirs = data_preparation(config, load_dataset(config))
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        for field in other.dataset.inter_feat:
            assert torch.equal(one.dataset.inter_feat[field], other.dataset.inter_feat[field])
