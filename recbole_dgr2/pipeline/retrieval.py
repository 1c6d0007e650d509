"""The retrievers of a run: trained once, kept in the cache, and made only where something asks for their scores."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.config import Config, retriever_config
from recbole_dgr2.data.parts import Part, final_part
from recbole_dgr2.data.sequences import Sequences
from recbole_dgr2.model.history import history_scorer
from recbole_dgr2.model.retriever import (
    CHECKPOINT_NAME,
    checkpoint_options,
    load_part_retriever,
    load_retriever,
    train_part_retriever,
    train_retriever,
)
from recbole_dgr2.model.scorer import Retriever
from recbole_dgr2.pipeline.views import CandidateOptions
from recbole_dgr2.system.cache import Cache, copy_file, file_digest, link_files
from recbole_dgr2.utils import load_dataset, sequences_from_dataset, vocabulary

_PASSING = (
    *("checkpoint_dir", "data_path", "dataset_save_path", "dataloaders_save_path", "save_dataset"),
    *("save_dataloaders", "gpu_id", "use_gpu", "device", "state", "encoding", "show_progress"),
    *("log_wandb", "wandb_project", "eval_batch_size", "local_rank", "rank", "ip", "port", "offset"),
    *("topk", "metrics", "benchmark_filename"),
)
"""Keys of RecBole that change no retriever's weights but by a device's arithmetic, or that a fingerprint covers.

The best validated epoch is kept, so whatever decides the value or the moment of a validation is none of them:
eval_step, valid_metric with its direction, and metric_decimal_place, since rounded values tie. topk and metrics only
say what else is measured. Nor are worker and the number of processes, which decide negative samples and batches.
"""

logger = logging.getLogger(__name__)


class RetrieverStore:
    """The retriever of a run, trained on any part of the training interactions.

    Args:
        config: the run.
        options: which retriever, and how training candidates are kept from their targets.
        cache: where trained retrievers are looked for and kept.
        data: fingerprint of the data set's files.
        dataset: the run's own data set, which the candidates are for.
    """

    def __init__(
        self, config: Config, options: CandidateOptions, cache: Cache, data: dict[str, str], dataset: Any
    ) -> None:
        self._options = options
        self._cache = cache
        self._data = data
        self._run_dataset = dataset
        changes = checkpoint_options(options.checkpoint)[1] if options.checkpoint else {}
        self.config: Any = retriever_config(config, **changes)
        self._made: dict[str, Retriever] = {}

    @property
    def name(self) -> str:
        """RecBole's name of the retriever."""
        return str(self.config["model"])

    @cached_property
    def dataset(self) -> Any:
        """RecBole's data set of the retriever, not split; ValueError unless its id vocabularies are the run's."""
        dataset = load_dataset(self.config)
        vocabulary(self._run_dataset).require(vocabulary(dataset), f"retriever {self.name}")
        return dataset

    @cached_property
    def sequences(self) -> Sequences:
        """All interactions."""
        return sequences_from_dataset(self._run_dataset)

    def description(self, part: Part) -> dict[str, Any]:
        """Everything that decides the weights of the retriever of a part, as JSON values."""
        checkpoint = self._options.checkpoint
        kept = {key: value for key, value in self.config.final_config_dict.items() if key not in _PASSING}
        return {
            "data": self._data,
            "retriever": self.name,
            "options": {key: _plain(value) for key, value in sorted(kept.items())},
            "checkpoint": None if checkpoint is None else file_digest(checkpoint),
            "part": part.name,
            "lengths": _digest(part.lengths),
            "history_scored": self._history_scored,
        }

    @property
    def _history_scored(self) -> bool:
        return self._options.split.mode == "user_folds"

    def retriever(self, part: Part) -> Retriever:
        """The retriever of a part: from this object, from the cache, or trained now."""
        if part.name not in self._made:
            retriever = self._make(part)
            self._made[part.name] = history_scorer(retriever) if self._history_scored else retriever
        return self._made[part.name]

    def final(self) -> Retriever:
        """The retriever of validation and test lists."""
        return self.retriever(final_part(self.sequences))

    def training_seconds(self) -> float:
        """How long the final retriever took to train, now or when it came into the cache; 0 where it was given."""
        if self._options.checkpoint:
            return 0.0
        self.final()
        return self._cache.seconds(self._checkpoint(final_part(self.sequences)))

    def keep_final(self, folder: Path) -> None:
        """Put the final retriever's checkpoint into `folder`, so that a run can be opened again without the cache."""
        final = final_part(self.sequences)
        if self._options.checkpoint:
            copy_file(self._options.checkpoint, folder / CHECKPOINT_NAME)
            return
        path = self._checkpoint(final)
        if not path.exists():
            self.final()
        link_files([path, path.with_suffix(".json")], folder)

    def _checkpoint(self, part: Part) -> Path:
        name = f"retriever-{self.name}-{part.name}-{self._cache.key(self._trained_as(part))}"
        return self._folder / name / CHECKPOINT_NAME

    def _trained_as(self, part: Part) -> dict[str, Any]:
        whole = self.description(part)
        return {key: value for key, value in whole.items() if key != "history_scored"}

    def _make(self, part: Part) -> Retriever:
        if part.name == "leaky":
            part = final_part(self.sequences)
        dataset, given, path = self.dataset, self._options.checkpoint, self._checkpoint(part)
        if part.name != "final":
            return self._trained(
                part,
                lambda folder: train_part_retriever(self.final(), self.config, dataset, folder, part.lengths),
                lambda: load_part_retriever(path, self.config, dataset, part.lengths),
            )
        if given is not None:
            return load_retriever(given, self.config, dataset)
        return self._trained(
            part,
            lambda folder: train_retriever(self.config, dataset, folder),
            lambda: load_retriever(path, self.config, dataset),
        )

    def _trained(
        self, part: Part, train: Callable[[Path], Retriever], load: Callable[[], Retriever]
    ) -> Retriever:
        path, description = self._checkpoint(part), self._trained_as(part)
        if self._cache.sound(path, description):
            return load()
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=self._folder) as folder:
            start = time.perf_counter()
            retriever = train(Path(folder) / "new")
            seconds = time.perf_counter() - start
            shutil.rmtree(path.parent, ignore_errors=True)
            (Path(folder) / "new").replace(path.parent)
        self._cache.seal(path, description, seconds)
        return retriever

    @cached_property
    def _folder(self) -> Path:
        """The cache's, or one that lasts as long as this object."""
        if self._cache.folder is not None:
            return self._cache.folder
        self._temporary = tempfile.TemporaryDirectory(prefix="recbole_dgr2-")
        return Path(self._temporary.name)


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:24]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
