"""Retrievers: RecBole models by name, hold-out training, checkpoints, and what they may not read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recbole.data import data_preparation
from recbole.utils import init_seed

import recbole_dgr2.model.retriever as module
from recbole_dgr2.config import retriever_config
from recbole_dgr2.data.sequences import leave_one_out_rows
from recbole_dgr2.model.retriever import (
    Retriever,
    checkpoint_options,
    holdout_lengths,
    load_retriever,
    train_holdout_retriever,
    train_retriever,
)
from recbole_dgr2.utils import (
    build_trainer,
    keep_interactions,
    load_dataset,
    sequences_from_dataset,
    split_loaders,
    vocabulary,
)
from tests.recsys import recbole_config, run_config, write_interactions

NAMES = ["Pop", "ItemKNN", "BPR", "LightGCN", "NeuMF", "GRU4Rec", "SASRec", "BERT4Rec"]
LENGTHS = [5, 6, 7, 8, 9, 10, 12, 14] * 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_interactions(tmp_path_factory.mktemp("data"), LENGTHS, 30)


def trained(name: str, data: Path, folder: Path, **options: Any) -> tuple[Retriever, Any, Any]:
    config = recbole_config(name, data, **options)
    dataset = load_dataset(config)
    return train_retriever(config, dataset, folder), config, dataset


@pytest.mark.parametrize("name", NAMES)
def test_any_model_trains_scores_and_reloads(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    retriever, config, dataset = trained(name, data, tmp_path / "run" / "retriever")
    sequences = sequences_from_dataset(dataset)
    rows = leave_one_out_rows(sequences, "test")
    histories = rows.histories(sequences, 50)
    scores = retriever.score(rows.users, histories)
    assert scores.shape == (len(LENGTHS), dataset.item_num)
    alone = retriever.score(rows.users[3:4], histories[3:4])
    torch.testing.assert_close(alone[0], scores[3], rtol=1e-5, atol=1e-6)
    again = load_retriever(tmp_path / "run" / "retriever" / "retriever.pth", config, dataset)
    assert torch.equal(again.score(rows.users, histories), scores)
    assert (again.name, again.kind, again.best_epoch) == (name, retriever.kind, retriever.best_epoch)
    assert [path.name for path in tmp_path.iterdir()] == [
        "run"
    ]  # nothing of RecBole is left in the current folder
    assert hasattr(dataset.inter_feat, "iloc")  # the data set given is as before


def test_scores_are_those_of_recboles_own_run(data: Path, tmp_path: Path) -> None:
    """Best weights, not the last ones: the same seed through RecBole's own calls gives the same scores."""
    options = {"epochs": 8, "learning_rate": 0.3, "stopping_step": 2}
    retriever, _, _ = trained("BPR", data, tmp_path / "ours", **options)
    own = recbole_config("BPR", data, **options)
    train_data, valid_data, _ = data_preparation(own, load_dataset(own))
    init_seed(own["seed"], own["reproducibility"])
    model = module.get_model("BPR")(own, train_data.dataset)
    own["checkpoint_dir"] = str(tmp_path / "theirs")
    trainer = build_trainer(own, model)
    trainer.fit(train_data, valid_data, saved=True, verbose=False)
    trainer.evaluate(valid_data, load_best_model=True)
    users = np.arange(1, 10)
    theirs = torch.stack([model.full_sort_predict({"user_id": torch.tensor([int(u)])}) for u in users])
    torch.testing.assert_close(retriever.score(users, []), theirs)
    assert retriever.best_epoch < 7


def test_sequential_scores_use_the_recent_history_only(data: Path, tmp_path: Path) -> None:
    retriever, _, _ = trained("SASRec", data, tmp_path)
    long = [np.arange(1, 12)]
    assert torch.equal(retriever.score(np.array([1]), long), retriever.score(np.array([5]), [long[0][-6:]]))
    with pytest.raises(ValueError, match="user 2: no history, and SASRec scores histories"):
        retriever.score(np.array([1, 2]), [long[0], long[0][:0]])


@pytest.mark.parametrize("name", ["BPR", "SASRec"])
def test_the_holdout_retriever_sees_no_training_target(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, config, dataset = trained(name, data, tmp_path / "final", epochs=3)
    sequences = sequences_from_dataset(dataset)
    seen: dict[str, Any] = {}
    fit = module._fit

    def spy(config: Any, train_data: Any, valid_data: Any, folder: Path) -> Retriever:
        seen.update(feat=train_data.dataset.inter_feat, valid=valid_data, epochs=config["epochs"])
        return fit(config, train_data, valid_data, folder)

    monkeypatch.setattr(module, "_fit", spy)
    held = train_holdout_retriever(final, config, dataset, tmp_path / "held", last_m=4)
    pairs = set(zip(seen["feat"]["user_id"].tolist(), seen["feat"]["item_id"].tolist(), strict=True))
    rows = leave_one_out_rows(sequences, "train", 4)
    targets = set(zip(rows.users.tolist(), rows.targets(sequences).tolist(), strict=True))
    targets |= {
        (user, int(item))
        for phase in ("valid", "test")
        for user, item in zip(*_pairs(sequences, phase), strict=True)
    }
    assert not pairs & targets
    lengths = holdout_lengths(sequences, 4)
    kept = [(u, int(i)) for u in range(sequences.n_users) for i in sequences.of(u)[: lengths[u]]]
    assert pairs <= set(kept)
    assert len(pairs) == len(kept) - (0 if name == "BPR" else int((lengths > 0).sum()))
    assert seen["valid"] is None
    assert seen["epochs"] == final.best_epoch + 1 == held.best_epoch + 1
    assert held.info.vocabulary == final.info.vocabulary
    assert config["epochs"] == 3  # the config given is as before


def _pairs(sequences: Any, phase: Any) -> tuple[list[int], list[int]]:
    rows = leave_one_out_rows(sequences, phase)
    return rows.users.tolist(), rows.targets(sequences).tolist()


def test_the_holdout_path_is_recboles_own_loader(data: Path, tmp_path: Path) -> None:
    """The split that keeps everything in training gives the loader of the ordinary split's training part."""
    config = recbole_config("SASRec", data)
    dataset = load_dataset(config)
    ordinary = data_preparation(config, dataset.copy(dataset.inter_feat))[0].dataset.inter_feat
    sequences = sequences_from_dataset(dataset)
    reduced = keep_interactions(dataset, sequences.training_lengths())
    config["eval_args"] = {**config["eval_args"], "split": {"RS": [1, 0, 0]}}
    found = split_loaders(config, reduced)[0].dataset.inter_feat
    for field in ("user_id", "item_id", "item_id_list", "item_length"):
        assert torch.equal(found[field], ordinary[field])


def test_a_short_user_keeps_one_training_interaction(tmp_path: Path) -> None:
    config = recbole_config("BPR", write_interactions(tmp_path, [1, 2, 3, 4, 5, 12], 30))
    sequences = sequences_from_dataset(load_dataset(config))
    n = sequences.lengths[1:]
    kept = holdout_lengths(sequences, 3)[1:]
    assert dict(zip(n.tolist(), kept.tolist(), strict=True)) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 12: 7}


def test_a_checkpoint_brings_its_own_options(data: Path, tmp_path: Path) -> None:
    retriever, _, dataset = trained("BPR", data, tmp_path, embedding_size=12)
    path = tmp_path / "retriever.pth"
    name, options = checkpoint_options(path)
    assert (name, options["embedding_size"], options["epochs"]) == ("BPR", 12, 2)
    config = retriever_config(run_config("BPR", data), **options)
    users = np.array([1, 2])
    assert torch.equal(load_retriever(path, config, dataset).score(users, []), retriever.score(users, []))


def test_a_checkpoint_of_another_data_set_is_refused(data: Path, tmp_path: Path) -> None:
    trained("BPR", data, tmp_path / "a")
    path = tmp_path / "a" / "retriever.pth"
    other = write_interactions(tmp_path / "other", [6] * 9, 25, seed=1)
    config = recbole_config("BPR", other)
    dataset = load_dataset(config)
    counts = f"the data set has 9 users and {dataset.item_num - 1} items"
    with pytest.raises(ValueError, match=f"vocabulary of 24 users and 30 items, {counts}"):
        load_retriever(path, config, dataset)
    path.with_suffix(".json").unlink()  # as RecBole itself writes it
    with pytest.raises(
        ValueError, match=r"user_embedding.weight is \[25, 8\], but \[10, 8\] for the data set's 9"
    ):
        load_retriever(path, config, dataset)
    trained("ItemKNN", data, tmp_path / "b")
    knn = tmp_path / "b" / "retriever.pth"
    knn.with_suffix(".json").unlink()
    config = recbole_config("ItemKNN", other)
    with pytest.raises(ValueError, match=r"w is .* but .* for the data set's 9 users"):
        load_retriever(knn, config, load_dataset(config))


def test_the_same_counts_with_other_names_are_refused(data: Path, tmp_path: Path) -> None:
    _, config, dataset = trained("BPR", data, tmp_path)
    side = tmp_path / "retriever.json"
    content = json.loads(side.read_text())
    content["vocabulary"]["fingerprint"] = "0"
    side.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the same numbers but other names"):
        load_retriever(tmp_path / "retriever.pth", config, dataset)


def test_bad_checkpoints(data: Path, tmp_path: Path) -> None:
    _, config, dataset = trained("BPR", data, tmp_path)
    with pytest.raises(ValueError, match=r"none.pth: no such file"):
        load_retriever(tmp_path / "none.pth", config, dataset)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match="not a RecBole checkpoint, it lacks config, epoch"):
        load_retriever(tmp_path / "foreign.pth", config, dataset)
    pop = recbole_config("Pop", data)
    with pytest.raises(ValueError, match="holds a BPR, expected a Pop"):
        load_retriever(tmp_path / "retriever.pth", pop, dataset)


class Reads(torch.nn.Module):
    """A model that reads one more field, or answers with what it is given."""

    def __init__(self, field: str | None = None, answer: float = 0.0) -> None:
        super().__init__()
        self.field, self.answer = field, answer

    def full_sort_predict(self, interaction: Any) -> torch.Tensor:
        if self.field is not None:
            interaction[self.field]
        scores = torch.zeros(len(interaction), 31)
        scores[-1, 4] = self.answer
        return scores


def test_bad_scores_and_fields_name_the_retriever(data: Path, tmp_path: Path) -> None:
    retriever, _, _ = trained("SASRec", data, tmp_path)
    users, histories = np.array([3, 7]), [np.array([1, 2]), np.array([2])]
    for field in ("rating", "item_id", "timestamp", "title"):
        retriever.model = Reads(field)
        with pytest.raises(ValueError, match=f"retriever SASRec: reads the field '{field}' to score"):
            retriever.score(users, histories)
    for answer in (float("nan"), float("inf")):
        retriever.model = Reads(answer=answer)
        with pytest.raises(
            ValueError, match=r"retriever SASRec: NaN or infinite scores \(first for user 7\)"
        ):
            retriever.score(users, histories)
    with pytest.raises(ValueError, match="user 99: unknown to SASRec"):
        retriever.score(np.array([1, 99]), histories)
    retriever.info = dataclasses.replace(
        retriever.info, vocabulary=dataclasses.replace(retriever.info.vocabulary, n_items=40)
    )
    with pytest.raises(ValueError, match="62 scores for 2 x 40 items"):
        retriever.model = Reads()
        retriever.score(users, histories)


def test_bad_input(data: Path, tmp_path: Path) -> None:
    config = recbole_config("S3Rec", data)
    with pytest.raises(ValueError, match="S3Rec: train_stage 'pretrain' trains no recommender"):
        train_retriever(config, load_dataset(config), tmp_path)
    config = recbole_config("BPR", data)
    dataset = load_dataset(config)
    final = train_retriever(config, dataset, tmp_path)
    with pytest.raises(ValueError, match="train_last_m 0: expected at least 1"):
        train_holdout_retriever(final, config, dataset, tmp_path / "held", 0)
    empty = dataset.copy(dataset.inter_feat.iloc[:0])
    with pytest.raises(ValueError, match="data set small: no interactions left"):
        train_retriever(config, empty, tmp_path)
    untimed = dataset.copy(dataset.inter_feat.drop(columns="timestamp"))
    with pytest.raises(ValueError, match="data set small: no timestamp field 'timestamp'"):
        train_retriever(config, untimed, tmp_path)
    assert vocabulary(untimed) == final.info.vocabulary


def test_users_too_short_to_train_on(tmp_path: Path) -> None:
    config = recbole_config("SASRec", write_interactions(tmp_path, [1] * 8, 20))
    with pytest.raises(ValueError, match="data set small: no user has enough interactions to train on"):
        train_retriever(config, load_dataset(config), tmp_path / "run")
    config = recbole_config("SASRec", write_interactions(tmp_path, [4] * 20, 20))
    final = train_retriever(config, load_dataset(config), tmp_path / "run")
    with pytest.raises(ValueError, match="no training interaction is left for the retriever"):
        train_holdout_retriever(final, config, load_dataset(config), tmp_path / "held", 3)
