"""Retrievers that score histories: the same scores as the model's own, for users it never saw, or a refusal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recbole_dgr2.config import host_keys
from recbole_dgr2.data.parts import SplitOptions, training_parts
from recbole_dgr2.data.sequences import leave_one_out_rows
from recbole_dgr2.model.history import HistoryRetriever, history_scorer
from recbole_dgr2.model.retriever import load_part_retriever, train_part_retriever, train_retriever
from recbole_dgr2.utils import load_dataset, sequences_from_dataset
from tests.recsys import recbole_config, write_interactions

LENGTHS = [5, 6, 7, 8, 9, 10, 12, 14] * 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_interactions(tmp_path_factory.mktemp("data"), LENGTHS, 30)


@pytest.mark.parametrize("name", ["ItemKNN", "EASE", "SLIMElastic", "Pop"])
def test_a_training_history_scores_as_the_model_does(name: str, data: Path, tmp_path: Path) -> None:
    config = recbole_config(name, data)
    dataset = load_dataset(config)
    retriever = train_retriever(config, dataset, tmp_path)
    scorer = history_scorer(retriever)
    sequences = sequences_from_dataset(dataset)
    users = np.arange(1, sequences.n_users)
    histories = [sequences.of(user)[: sequences.training_lengths()[user]] for user in users.tolist()]
    own = retriever.score(users, histories)
    torch.testing.assert_close(scorer.score(users, histories).to(own.dtype), own, rtol=1e-5, atol=1e-6)
    other = scorer.score(users[::-1].copy(), histories)
    assert torch.equal(other, scorer.score(users, histories))  # the user's id is not read
    assert isinstance(scorer, HistoryRetriever) == (name != "Pop")
    assert scorer.score(users[:1], [np.array([], dtype=np.int64)]).shape == (1, sequences.n_items)


@pytest.mark.parametrize("name", ["BPR", "LightGCN"])
def test_models_of_user_vectors_are_refused(name: str, data: Path, tmp_path: Path) -> None:
    config = recbole_config(name, data, epochs=1)
    retriever = train_retriever(config, load_dataset(config), tmp_path)
    with pytest.raises(ValueError, match=f"user_folds: {name} scores users by their id.*ItemKNN.*SASRec"):
        history_scorer(retriever)


def test_sequential_models_are_refused_only_with_user_vectors(data: Path, tmp_path: Path) -> None:
    config = recbole_config("SASRec", data, epochs=1)
    retriever = train_retriever(config, load_dataset(config), tmp_path / "a")
    assert history_scorer(retriever) is retriever
    sampling = {"distribution": "uniform", "sample_num": 1}
    config = recbole_config("FPMC", data, epochs=1, embedding_size=8, train_neg_sample_args=sampling)
    retriever = train_retriever(config, load_dataset(config), tmp_path / "b")
    with pytest.raises(ValueError, match="FPMC has a vector for every user"):
        history_scorer(retriever)


def test_user_neighbours_are_refused(data: Path, tmp_path: Path) -> None:
    if "knn_method" not in host_keys("ItemKNN", "toy"):
        pytest.skip("RecBole 1.2.0 compares items only")
    config = recbole_config("ItemKNN", data, knn_method="user")
    retriever = train_retriever(config, load_dataset(config), tmp_path)
    with pytest.raises(ValueError, match="with knn_method user compares users"):
        history_scorer(retriever)


@pytest.mark.parametrize("name", ["ItemKNN", "LightGCN", "GRU4Rec"])
def test_a_part_is_loaded_as_it_was_trained(name: str, data: Path, tmp_path: Path) -> None:
    """Graph models build a matrix of their interactions that no checkpoint holds: it must be the part's."""
    config = recbole_config(name, data, epochs=1)
    dataset = load_dataset(config)
    final = train_retriever(config, dataset, tmp_path / "final")
    sequences = sequences_from_dataset(dataset)
    part = training_parts(sequences, SplitOptions("last_m", 3, 2, 0))[0]
    trained = train_part_retriever(final, config, dataset, tmp_path / "part", part.lengths)
    loaded = load_part_retriever(tmp_path / "part" / "retriever.pth", config, dataset, part.lengths)
    rows = leave_one_out_rows(sequences, "train", 1)
    histories = rows.histories(sequences)
    assert torch.equal(loaded.score(rows.users, histories), trained.score(rows.users, histories))
    assert not torch.equal(trained.score(rows.users, histories), final.score(rows.users, histories))


def test_a_fold_has_not_seen_its_users(data: Path, tmp_path: Path) -> None:
    """Other interactions of the users of a fold change nothing in the retriever that serves them."""
    scores = []
    config = recbole_config("ItemKNN", data)
    dataset = load_dataset(config)
    sequences = sequences_from_dataset(dataset)
    fold = training_parts(sequences, SplitOptions("user_folds", 2, 2, 0))[0]
    final = train_retriever(config, dataset, tmp_path / "final")
    changed = dataset.copy(dataset.inter_feat.copy())
    mine = fold.serves[changed.inter_feat["user_id"].to_numpy()]
    changed.inter_feat.loc[mine, "item_id"] = changed.inter_feat.loc[mine, "item_id"] % 29 + 1
    for place, given in enumerate((dataset, changed)):
        part = train_part_retriever(final, config, given, tmp_path / str(place), fold.lengths)
        rows = leave_one_out_rows(sequences, "train", 2)
        rows = rows.take(fold.serves[rows.users])
        scores.append(history_scorer(part).score(rows.users, rows.histories(sequences)))
    assert torch.equal(*scores)
