"""Glue between RecBole and the plugin: data sets, sequences, loaders, the trainer, metrics of lists."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from recbole.data import create_samplers, get_dataloader
from recbole.data import dataset as dataset_module
from recbole.data.interaction import Interaction
from recbole.evaluator import Collector, Evaluator
from recbole.evaluator.collector import DataStruct
from recbole.trainer import trainer as trainer_module
from recbole.utils import ModelType, get_trainer, init_seed
from torch.utils.tensorboard import SummaryWriter

from recbole_dgr2.data.sequences import Sequences
from recbole_dgr2.system.threads import choose_threads

__all__ = [
    "Vocabulary",
    "build_trainer",
    "choose_threads",
    "init_seed",
    "interaction_of",
    "item_tokens",
    "keep_interactions",
    "load_dataset",
    "recbole_metrics",
    "sequences_from_dataset",
    "split_loaders",
    "vocabulary",
]


@dataclass(frozen=True)
class Vocabulary:
    """The id maps of a data set: sizes with padding counted, and a hash of all names in id order."""

    n_users: int
    n_items: int
    fingerprint: str

    def require(self, other: Vocabulary, what: str) -> None:
        """Raise ValueError naming both counts where `other`, which belongs to `what`, is not this vocabulary."""
        if other == self:
            return
        sizes = (self.n_users - 1, self.n_items - 1) != (other.n_users - 1, other.n_items - 1)
        reason = "" if sizes else ", the same numbers but other names"
        raise ValueError(
            f"{what}: vocabulary of {other.n_users - 1} users and {other.n_items - 1} items, the data set has "
            f"{self.n_users - 1} users and {self.n_items - 1} items{reason}; use the data set it was trained on"
        )


def vocabulary(dataset: Any) -> Vocabulary:
    """The vocabulary of a RecBole data set (raw or split)."""
    digest = hashlib.sha256()
    for field in (dataset.uid_field, dataset.iid_field):
        digest.update("\x1f".join(map(str, dataset.field2id_token[field])).encode())
        digest.update(b"\x1e")
    return Vocabulary(dataset.user_num, dataset.item_num, digest.hexdigest())


def load_dataset(config: Any) -> Any:
    """RecBole's data set of a config, read from the atomic files and not split.

    RecBole's `create_dataset` prefers a pickled copy under `checkpoint_dir` if there is one, even where the files
    have changed since, and runs whatever that pickle contains (RecBole #1602, #1697).
    """
    own = getattr(dataset_module, f"{config['model']}Dataset", None)
    sequential = config["MODEL_TYPE"] == ModelType.SEQUENTIAL
    return (own or (dataset_module.SequentialDataset if sequential else dataset_module.Dataset))(config)


def split_loaders(config: Any, dataset: Any) -> tuple[Any, Any, Any]:
    """RecBole's training, validation and test loaders of an unsplit data set, which is left as it is.

    The same as RecBole's `data_preparation` without its pickled copies. A part without rows is None.
    """
    fresh = dataset.copy(dataset.inter_feat)
    fresh.config = config
    parts = fresh.build()
    samplers = create_samplers(config, fresh, parts)
    shuffled = (config["shuffle"], False, False)
    train, valid, test = (
        get_dataloader(config, phase)(config, part, sampler, shuffle=shuffle) if len(part) else None
        for phase, part, sampler, shuffle in zip(
            ("train", "valid", "test"), parts, samplers, shuffled, strict=True
        )
    )
    return train, valid, test


def item_tokens(dataset: Any) -> list[str]:
    """External item names by internal id, `[n_items]`; the first is RecBole's `[PAD]`."""
    return [str(token) for token in dataset.field2id_token[dataset.iid_field]]


def user_tokens(dataset: Any) -> list[str]:
    """External user names by internal id, `[n_users]`; the first is RecBole's `[PAD]`."""
    return [str(token) for token in dataset.field2id_token[dataset.uid_field]]


def sequences_from_dataset(dataset: Any) -> Sequences:
    """Every user's items in RecBole's time order.

    RecBole sorts stably by the timestamp as float32, so equal times, and times that differ by less than float32
    resolves (64 s to 128 s today), stay in file order; the same is done here.

    Args:
        dataset: A RecBole data set before `data_preparation` (all interactions), or a split of a sequential one
            such as `train_data.dataset` (the interactions of that split).

    Raises:
        ValueError: No interactions, or no timestamp field.
    """
    users, items = interactions(dataset)
    order = time_order(dataset)
    counts = np.bincount(users, minlength=dataset.user_num)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    sequences = Sequences(dataset.user_num, dataset.item_num, offsets, items[order])
    list_field = f"{dataset.iid_field}{dataset.config['LIST_SUFFIX']}"
    return (
        _with_first_items(sequences, dataset, list_field) if list_field in dataset.inter_feat else sequences
    )


def interactions(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of all interactions in file order, two int64 arrays; ValueError where there are none."""
    feat = dataset.inter_feat
    if not len(feat):
        raise ValueError(f"data set {dataset.dataset_name}: no interactions left after filtering")
    return (
        np.asarray(feat[dataset.uid_field], dtype=np.int64),
        np.asarray(feat[dataset.iid_field], dtype=np.int64),
    )


def time_order(dataset: Any) -> np.ndarray:
    """int64 `[n_interactions]`: positions in `inter_feat`, sorted by user and by time within a user."""
    feat, field = dataset.inter_feat, dataset.time_field
    if field is None or field not in feat:
        raise ValueError(
            f"data set {dataset.dataset_name}: no timestamp field {field!r}; name it in TIME_FIELD and load_col.inter"
        )
    times = np.asarray(feat[field])
    if times.dtype == np.float64:
        times = times.astype(np.float32)
    if np.isnan(times).any():
        raise ValueError(
            f"data set {dataset.dataset_name}: {field} is missing in {np.isnan(times).sum()} rows"
        )
    return np.lexsort((times, np.asarray(feat[dataset.uid_field])))


def _with_first_items(sequences: Sequences, dataset: Any, list_field: str) -> Sequences:
    """A sequential split holds (history, next item) pairs; put each user's first item before the next items."""
    feat = dataset.inter_feat
    lengths = np.asarray(feat[dataset.item_list_length_field])
    first = lengths == 1
    starts = np.asarray(feat[dataset.uid_field])[first]
    heads = np.zeros(sequences.n_users, dtype=np.int64)
    heads[starts] = np.asarray(feat[list_field])[first, 0]
    known = np.flatnonzero(heads)
    items = np.insert(sequences.items, sequences.offsets[known], heads[known])
    counts = sequences.lengths + (heads > 0)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Sequences(sequences.n_users, sequences.n_items, offsets, items)


def keep_interactions(dataset: Any, lengths: np.ndarray) -> Any:
    """A copy of an unsplit RecBole data set with the first `lengths[u]` interactions of each user only.

    The copy keeps the id vocabularies; the data set given is not changed.
    """
    users, _ = interactions(dataset)
    order = time_order(dataset)
    counts = np.bincount(users, minlength=dataset.user_num)
    rank = np.empty(len(users), dtype=np.int64)
    rank[order] = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    feat: pd.DataFrame = dataset.inter_feat
    return dataset.copy(feat[rank < lengths[users]].reset_index(drop=True))


def recbole_metrics(config: Any, train: Any, ranked: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """RecBole's own metrics of ranked lists with one target each, by its Evaluator.

    Args:
        config: RecBole's config; `metrics`, `topk` and `metric_decimal_place` are read.
        train: What the metrics on items need (coverage, popularity): a data loader, a data set, or a DataStruct
            with the `data.*` entries. Use the retriever's own training data: RecBole counts an item once less a
            user in a sequential split than in a general one.
        ranked: int64 `[R, >= max(topk)]`, best first.
        targets: int64 `[R]`.

    Returns:
        What `Trainer.evaluate` returns, e.g. `{"recall@10": 0.1234}`.
    """
    kmax = max(config["topk"])
    if ranked.ndim != 2 or ranked.shape[1] < kmax or len(ranked) != len(targets):
        raise ValueError(
            f"ranked: expected [{len(targets)}, >= {kmax}] ids for topk {config['topk']}, got {list(ranked.shape)}"
        )
    struct = train if isinstance(train, DataStruct) else _train_struct(config, train)
    top = ranked[:, :kmax].cpu()
    hits = (top == targets[:, None].cpu()).int()
    struct.set("rec.items", top)
    struct.set("rec.topk", torch.cat((hits, torch.ones(len(hits), 1, dtype=torch.int)), dim=1))
    return dict(Evaluator(config).evaluate(struct))


def _train_struct(config: Any, train: Any) -> DataStruct:
    @dataclass(frozen=True)
    class Loader:
        dataset: Any

    collector = Collector(config)
    collector.data_collect(train if hasattr(train, "dataset") else Loader(train))
    return collector.data_struct


def build_trainer(config: Any, model: Any) -> Any:
    """RecBole's trainer for `model`, with its TensorBoard files under `checkpoint_dir`.

    RecBole writes them to `log_tensorboard` in the current folder, and no option changes that.
    """
    folder = Path(config["checkpoint_dir"]) / "tensorboard"
    original = trainer_module.get_tensorboard
    trainer_module.get_tensorboard = lambda logger: SummaryWriter(str(folder))
    try:
        return get_trainer(model.type, type(model).__name__)(config, model)
    finally:
        trainer_module.get_tensorboard = original


def interaction_of(columns: dict[str, torch.Tensor], device: torch.device | str) -> Interaction:
    """A RecBole Interaction of the given columns on a device."""
    return Interaction({name: column.to(device) for name, column in columns.items()})
