"""DGR2 inside RecBole: identity equals the retriever's own metrics, label-blindness, case study, bad input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recbole.data.interaction import Interaction
from recbole.utils.case_study import full_sort_scores, full_sort_topk

from recbole_dgr2.data.candidates import Candidates, HeadOptions, build_candidates
from recbole_dgr2.data.sequences import leave_one_out_rows
from recbole_dgr2.model.dgr2 import DGR2
from recbole_dgr2.model.retriever import Retriever, train_retriever
from recbole_dgr2.utils import (
    build_trainer,
    load_dataset,
    recbole_metrics,
    sequences_from_dataset,
    split_loaders,
)
from tests.recsys import recbole_config, run_config, write_interactions

LENGTHS = [5, 6, 7, 8, 9, 10, 12, 14] * 5


@dataclass(frozen=True)
class Order:
    order: tuple[int, ...]


class Fixed:
    """A re-ranker that gives every row the same order, and notes what it was given."""

    def __init__(self, order: list[int]) -> None:
        self.order = Order(tuple(order))
        self.seen: list[tuple[Candidates, list[np.ndarray]]] = []

    def rerank(self, candidates: Candidates, histories: list[np.ndarray]) -> list[Order]:
        self.seen.append((candidates, histories))
        return [self.order] * len(candidates)


class Shuffle:
    """A re-ranker with an order of its own for every user."""

    def rerank(self, candidates: Candidates, histories: list[np.ndarray]) -> list[Order]:
        users = candidates.rows.users.tolist()
        return [Order(tuple(np.random.default_rng(u).permutation(candidates.n).tolist())) for u in users]


@dataclass(frozen=True)
class Host:
    """A trained retriever and RecBole's data for it."""

    path: Path
    retriever: Retriever
    config: Any
    loaders: Any


@pytest.fixture(scope="module", params=["BPR", "SASRec", "Pop", "ItemKNN"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    path = write_interactions(tmp_path_factory.mktemp("data"), LENGTHS, 40)
    config = recbole_config(request.param, path)
    dataset = load_dataset(config)
    retriever = train_retriever(config, dataset, path / "retriever")
    return Host(path, retriever, config, split_loaders(config, dataset))


def dgr2(host: Host, reranker: Any = None, **options: Any) -> tuple[DGR2, Any, Any]:
    options = {"mask_history": host.retriever.kind == "general", **options}
    config = run_config(host.retriever.name, host.path, **options)
    loaders = split_loaders(config, load_dataset(config))
    return DGR2(config, loaders[0].dataset, host.retriever, reranker), config, loaders


def evaluate(host: Host, model: Any, config: Any, data: Any, folder: Path) -> dict[str, float]:
    """RecBole's Trainer.evaluate; popularity is counted in the retriever's training data."""
    config["checkpoint_dir"] = str(folder)
    trainer = build_trainer(config, model)
    trainer.eval_collector.data_collect(host.loaders[0])
    return dict(trainer.evaluate(data, load_best_model=False))


@pytest.mark.parametrize("topk", [[1, 3, 5], [10], [5, 20]])
def test_identity_equals_recboles_own_metrics(host: Host, topk: list[int], tmp_path: Path) -> None:
    """Through the Trainer and through lists, for N below and above max(topk), Pop's and ItemKNN's ties included."""
    options = {"topk": topk, "valid_metric": f"NDCG@{topk[-1]}"}
    own = recbole_config(host.retriever.name, host.path, **options)
    expected = evaluate(host, host.retriever.model, own, host.loaders[2], tmp_path)
    assert expected[f"recall@{max(topk)}"] > 0
    for n in (3, 10, 17):
        model, config, loaders = dgr2(host, Fixed(list(range(n))), n_candidates=n, **options)
        assert evaluate(host, model, config, loaders[2], tmp_path) == expected
        model.reranker = None
        assert evaluate(host, model, config, loaders[2], tmp_path) == expected
        assert lists_metrics(host, model, config) == expected


def lists_metrics(host: Host, model: DGR2, config: Any) -> dict[str, float]:
    """The metrics of candidates built outside RecBole's loop, extended to max(topk)."""
    sequences = sequences_from_dataset(load_dataset(config))
    rows = leave_one_out_rows(sequences, "test")
    kmax = max(config["topk"])
    options = HeadOptions(max(model.options.n_candidates, kmax), kmax, model.options.mask_history, 7)
    found = build_candidates(host.retriever.score, rows, sequences, options)
    targets = torch.from_numpy(rows.targets(sequences))
    return recbole_metrics(config, host.loaders[0], torch.from_numpy(found.ids), targets)


@pytest.mark.parametrize("n", [4, 15])
def test_a_new_order_reaches_recbole(host: Host, n: int, tmp_path: Path) -> None:
    """Trainer metrics of shuffled heads equal the metrics of the same lists."""
    options = {"n_candidates": n, "topk": [1, 3, 10]}
    model, config, loaders = dgr2(host, Shuffle(), **options)
    plain, _, _ = dgr2(host, **options)
    lists, targets = [], []
    for batch, _, _, positives in loaders[2]:
        head = torch.topk(plain.full_sort_predict(batch), 10).indices
        kept = model.full_sort_predict(batch)
        lists.append(torch.topk(kept, 10).indices)
        targets.append(positives)
        if n == 4:
            assert torch.equal(lists[-1][:, 4:], head[:, 4:])
            for user, old, new in zip(batch["user_id"].tolist(), head, lists[-1], strict=True):
                order = np.random.default_rng(user).permutation(4)
                assert new[:4].tolist() == old[torch.from_numpy(order)].tolist()
    by_lists = recbole_metrics(config, host.loaders[0], torch.cat(lists), torch.cat(targets))
    assert by_lists == evaluate(host, model, config, loaders[2], tmp_path)


def test_nothing_of_the_label_is_read(host: Host) -> None:
    model, _, loaders = dgr2(host, Shuffle())
    batch = next(iter(loaders[2]))[0]
    expected = model.full_sort_predict(batch)
    changed = dict(batch.interaction)
    generator = torch.Generator().manual_seed(0)
    for field in batch.columns:
        if field not in ("user_id", "item_id_list", "item_length"):
            shape, dtype = changed[field].shape, changed[field].dtype
            changed[field] = torch.randint(1, 40, shape, generator=generator).to(dtype)
    changed["rating"] = torch.rand(len(batch), generator=generator)
    assert torch.equal(model.full_sort_predict(Interaction(changed)), expected)
    bare = {field: changed[field] for field in ("user_id", "item_id_list", "item_length")}
    assert torch.equal(model.full_sort_predict(Interaction(bare)), expected)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("phase,index", [("valid", 1), ("test", 2), ("train", 0)])
def test_the_whole_history_is_found(host: Host, phase: Any, index: int, whole: bool) -> None:
    """Lists hold 6 items at most; older ones come from the data set, whole or training split; later ones never."""
    config = run_config(host.retriever.name, host.path)
    dataset = load_dataset(config)
    sequences = sequences_from_dataset(dataset)
    loaders = split_loaders(config, dataset)
    model = DGR2(config, dataset if whole else loaders[0].dataset, host.retriever)
    rows = leave_one_out_rows(sequences, phase, 99)
    expected = {
        (user, target): history.tolist()
        for user, target, history in zip(
            rows.users.tolist(), rows.targets(sequences).tolist(), rows.histories(sequences), strict=True
        )
    }
    feat = loaders[index].dataset.inter_feat
    found = [history.tolist() for history in model.histories(feat)]
    assert len(found) == len(expected)
    assert found == [
        expected[key] for key in zip(feat["user_id"].tolist(), feat["item_id"].tolist(), strict=True)
    ]


def test_of_several_places_the_earliest_is_taken(host: Host) -> None:
    model, _, _ = dgr2(host)
    items = [1, 2] * 5
    offsets = np.array([0, 0] + [10] * (model.sequences.n_users - 1))
    model.sequences = type(model.sequences)(model.sequences.n_users, 41, offsets, np.array(items))
    assert model._whole(1, np.array([1, 2] * 3)).tolist() == [1, 2] * 3
    assert model._whole(1, np.array([2, 1] * 3)).tolist() == [1, 2] * 3 + [1]
    with pytest.raises(ValueError, match="user 1: its item_id_list is no part of the user's sequence"):
        model._whole(1, np.array([3] * 6))


def test_masked_items_are_never_surfaced(host: Host) -> None:
    """35 of 40 items are asked for: users with longer histories have fewer, and the rest is 0 and stays last."""
    seen = Fixed(list(reversed(range(35))))
    model, _, loaders = dgr2(host, seen, n_candidates=35, mask_history=True)
    batch = next(iter(loaders[2]))[0]
    scores = model.full_sort_predict(batch)
    candidates, histories = seen.seen[0]
    for row, history in enumerate(histories):
        left = 40 - len(history)
        assert candidates.counts[row] == min(left, 35)
        assert (candidates.ids[row, candidates.counts[row] :] == 0).all()
        top = torch.topk(scores[row], 35).indices[: candidates.counts[row]]
        assert not set(top.tolist()) & {0, *history.tolist()}
        assert top.tolist()[: min(left, 35)] == candidates.ids[row, : min(left, 35)][::-1].tolist()
        assert torch.isneginf(scores[row]).sum() == 1 + len(history)


def test_a_repeated_target_is_excluded_like_any_item_of_the_history(tmp_path: Path) -> None:
    """RecBole spares a general model the repeated target when it masks; that would read the label."""
    folder = write_interactions(tmp_path, LENGTHS, 40)
    file = folder / "small" / "small.inter"
    file.write_text(
        file.read_text() + "".join(f"again\ti{i}\t5\t{9 * n}\n" for n, i in enumerate([1, 2, 3, 4, 1]))
    )
    config = run_config("Pop", folder, mask_history=True)
    dataset = load_dataset(config)
    host_config = recbole_config("Pop", folder)
    retriever = train_retriever(host_config, load_dataset(host_config), tmp_path / "retriever")
    test = split_loaders(config, dataset)[2].dataset.inter_feat
    row = test[(test["user_id"] == dataset.token2id("user_id", "again")).nonzero()[0]]
    assert row["item_id"].item() in row["item_id_list"].flatten().tolist()
    scores = DGR2(config, dataset, retriever).full_sort_predict(row)
    assert torch.isneginf(scores[0, row["item_id"].item()])


def test_case_study_works(host: Host) -> None:
    order = [2, 0, 1, *range(3, 10)]
    model, _, loaders = dgr2(host, Fixed(order), n_candidates=10)
    plain, _, _ = dgr2(host)
    users = np.array([3, 1, 8])
    before = full_sort_topk(users, plain, loaders[2], 10)[1]
    values, ids = full_sort_topk(users, model, loaders[2], 10)
    assert ids.tolist() == before[:, order].tolist()
    scores = full_sort_scores(users, model, loaders[2])
    assert torch.equal(scores.gather(1, ids), values)
    batch = loaders[2].dataset.inter_feat[:4]
    assert model.predict(batch).tolist() == [
        row[item]
        for row, item in zip(model.full_sort_predict(batch).tolist(), batch["item_id"].tolist(), strict=True)
    ]


def test_validation_rows_work_too(host: Host, tmp_path: Path) -> None:
    own = recbole_config(host.retriever.name, host.path)
    expected = evaluate(host, host.retriever.model, own, host.loaders[1], tmp_path)
    model, config, loaders = dgr2(host, Fixed(list(range(10))))
    assert evaluate(host, model, config, loaders[1], tmp_path) == expected


def test_bad_input(host: Host, tmp_path: Path) -> None:
    config = run_config(host.retriever.name, host.path)
    dataset = load_dataset(config)
    with pytest.raises(ValueError, match="DGR2: no retriever; pass retriever="):
        DGR2(config, dataset)
    large = run_config(host.retriever.name, host.path, n_candidates=41)
    with pytest.raises(ValueError, match="n_candidates 41: the catalogue has 40 items, use at most that"):
        DGR2(large, dataset, host.retriever)
    other = load_dataset(run_config("Pop", write_interactions(tmp_path, [6] * 9, 25)))
    text = (
        f"retriever {host.retriever.name}: vocabulary of 40 users and 40 items, the data set has 9 users and"
    )
    with pytest.raises(ValueError, match=text):
        DGR2(config, other, host.retriever)
    model, _, loaders = dgr2(host)
    with pytest.raises(NotImplementedError, match="the retriever is trained by train_retriever"):
        model.calculate_loss(None)  # type: ignore[arg-type]
    batch = next(iter(loaders[2]))[0]
    for order, message in (
        ([0] * 10, "permutation"),
        ([0, 1], r"expected 40 orders of 10 slots, got \[40, 2\]"),
    ):
        model.reranker = Fixed(order)
        with pytest.raises(ValueError, match=message):
            model.full_sort_predict(batch)
