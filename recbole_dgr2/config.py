"""Config of a run: RecBole's own, with the plugin's properties merged in and every given key checked.

Precedence is RecBole's: command line > config_dict > config files > properties. Text is never evaluated.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recbole.config import Config as RecBoleConfig
from recbole.evaluator.register import metrics_dict
from recbole.utils import EvaluatorType, ModelType
from recbole.utils.argument_list import (
    dataset_arguments,
    evaluation_arguments,
    general_arguments,
    training_arguments,
)

from recbole_dgr2.atomic_files import check_atomic_files
from recbole_dgr2.rules import check_together
from recbole_dgr2.schema import Option, nearest, option_files, options_of, parse_text, read_options, read_yaml
from recbole_dgr2.system.paths import host_dir

MODELS = {"DGR2": "recbole_dgr2.model.dgr2"}
DATA_VARIABLE = "RECBOLE_DGR2_DATA"
"""Environment variable that stands for data_path where no file, dictionary or command line sets it."""
RETRIEVER_KINDS = ("general", "sequential")
# RecBole reads these from a config although none of its own files lists them.
_HOST_EXTRA = ("model", "dataset", "config_files", "loss_type", "nproc", "world_size", "ip", "port", "offset")


def retriever_names() -> dict[str, str]:
    """Every general and sequential recommender of the installed RecBole: class name to module.

    Read from the package texts of `recbole.model.*_recommender`, since importing them all would import
    optional dependencies, and RecBole's own lookup answers an unknown name with an error about lightgbm
    (RecBole #2172).
    """
    names = {}
    for kind in RETRIEVER_KINDS:
        text = (host_dir() / "model" / f"{kind}_recommender" / "__init__.py").read_text(encoding="utf-8")
        for line in text.splitlines():
            words = line.split()
            if len(words) == 4 and words[0] == "from" and words[2] == "import":
                names[words[3]] = words[1]
    return names


def retriever_class(name: str) -> type:
    """The class of a retriever.

    Raises:
        ValueError: no general or sequential recommender has this name; the message lists the near ones.
    """
    names = retriever_names()
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(sorted(names))}"
        raise ValueError(f"retriever: RecBole has no general or sequential recommender {name!r}; {hint}")
    return getattr(importlib.import_module(names[name]), name)


def host_keys(retriever: str, dataset: str) -> set[str]:
    """Every key that RecBole, its data set files and one retriever's own file know."""
    properties = host_dir() / "properties"
    files = [properties / "overall.yaml", properties / "dataset" / "sample.yaml"]
    files += [properties / "dataset" / f"{dataset}.yaml", properties / "model" / f"{retriever}.yaml"]
    known = {*_HOST_EXTRA, *general_arguments, *training_arguments, *evaluation_arguments, *dataset_arguments}
    return known.union(*(read_yaml(path) for path in files if path.is_file()))


class _QuietConfig(RecBoleConfig):
    """RecBole's Config, but strings are not evaluated and no process's command line is read."""

    def _load_cmd_line(self) -> dict[str, Any]:
        return {}

    def _convert_config_dict(self, config_dict: dict[str, Any]) -> dict[str, Any]:
        return config_dict


class Config(_QuietConfig):
    """Configuration of a DGR2 run.

    Args:
        model: "DGR2", or the class itself.
        dataset: name of a folder below `data_path`, or ml-100k, which ships with RecBole.
        config_file_list: YAML files, later ones win.
        config_dict: keys and values.
        arguments: command line as a list of --key=value; None means none (`sys.argv` is never read).
    Raises:
        ValueError: an unknown key, an ill-typed value or one out of range; in one line, with key and origin.
        FileNotFoundError: a config file or the data set is missing.
    """

    def __init__(
        self,
        model: str | type | None = None,
        dataset: str | None = None,
        config_file_list: Sequence[str | Path] | None = None,
        config_dict: Mapping[str, Any] | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        self._given: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        typed = split_arguments(arguments or [])
        if os.environ.get(DATA_VARIABLE):
            self._give({"data_path": os.environ[DATA_VARIABLE]}, DATA_VARIABLE)
        files = [read_yaml(Path(path)) for path in config_file_list or []]
        for path, content in zip(config_file_list or [], files, strict=True):
            self._give(content, str(path))
        self._give(dict(config_dict or {}), "config_dict")
        self._give(typed, "command line")
        model = model if model is not None else self._given.get("model", "DGR2")
        name = model if isinstance(model, str) else model.__name__
        if name not in MODELS:
            raise ValueError(_not_a_model(name))
        dataset = dataset if dataset is not None else self._given.get("dataset")
        if not dataset:
            raise ValueError("dataset: none given; say which, e.g. --dataset=ml-100k")
        self._read_given(dataset, options_of(name, dataset))
        super().__init__(model=model, dataset=dataset, config_dict=copy.deepcopy(self._given))
        check_together(self.final_config_dict, self.options)
        check_atomic_files(self)

    def _give(self, values: Mapping[str, Any], origin: str) -> None:
        self._given.update(values)
        self._origin.update(dict.fromkeys(values, origin))

    def _read_given(self, dataset: str, options: Mapping[str, Option]) -> None:
        """Parse texts, then refuse keys that nobody knows and values that do not fit."""
        for key, value in self._given.items():
            if isinstance(value, str) and self._origin[key] in ("config_dict", "command line"):
                self._given[key] = parse_text(value, options.get(key))
        retriever = str(self._given.get("retriever", options["retriever"].default))
        retriever_class(retriever)
        known = host_keys(retriever, dataset) | set(options)
        for key, value in self._given.items():
            where = f"{key} ({self._origin[key]})"
            if key not in known:
                near = nearest(key, known)
                hint = f"; the nearest known key is {near!r}" if near else ""
                raise ValueError(
                    f"{where}: neither recbole_dgr2, RecBole nor {retriever} knows this key{hint}"
                )
            option = options.get(key)
            problem = option.problem(value) if option else None
            if key == "metrics" and not problem:
                problem = _metrics_problem(value)
            if problem:
                raise ValueError(f"{where}: {problem}")

    def _get_model_and_dataset(self, model: str | type, dataset: str) -> tuple[str, type, str]:
        found = getattr(importlib.import_module(MODELS[model]), model) if isinstance(model, str) else model
        return found.__name__, found, dataset

    def _load_internal_config_dict(self, model: str, model_class: type, dataset: str) -> None:
        super()._load_internal_config_dict(model, model_class, dataset)
        for path in option_files(model, dataset):
            self.internal_config_dict.update(read_yaml(path))

    def _get_final_config_dict(self) -> dict[str, Any]:
        final = super()._get_final_config_dict()
        # RecBole's sampler belongs to the retriever (retriever_config); the re-ranker itself samples nothing.
        final["train_neg_sample_args"] = None
        return final

    @property
    def options(self) -> dict[str, Option]:
        """Every option of the plugin by key."""
        return options_of(self.model, self.dataset)

    @property
    def given(self) -> dict[str, Any]:
        """What files, config_dict and the command line set, parsed."""
        return copy.deepcopy(self._given)


def _not_a_model(name: str) -> str:
    if name in retriever_names():
        return f"model: {name} is a retriever; to re-rank it use --retriever={name} (and --model=DGR2)"
    return f"model: expected one of {', '.join(MODELS)}, got {name!r}"


def split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """`--key=value` words as a dictionary; anything else is an error (RecBole drops it silently)."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not key.startswith("--") or not equals or len(key) == 2:
            raise ValueError(f"command line: expected --key=value, got {argument!r}")
        if given.setdefault(key[2:], value) != value:
            raise ValueError(f"command line: {key} is given twice with different values")
    return given


@contextmanager
def _no_command_line() -> Iterator[None]:
    """RecBole's Config reads `sys.argv` of any process, pytest's too (config/configurator.py:165)."""
    saved, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = saved


def _defaults(path: Path) -> dict[str, Any]:
    return {option.key: option.default for option in read_options(path)}


def _metrics_problem(metrics: Sequence[str]) -> str | None:
    """What is wrong with a list of RecBole's ranking metrics, in words, or None; RecBole ignores their case."""
    ranking = {
        name: metric for name, metric in metrics_dict.items() if metric.metric_type == EvaluatorType.RANKING
    }
    if not metrics:
        return "expected at least one ranking metric of RecBole, got []"
    for name in map(str, metrics):
        if name.lower() not in ranking:
            near = nearest(name.lower(), ranking)
            known = ", ".join(sorted(metric.__name__ for metric in ranking.values()))
            hint = f"; did you mean {ranking[near].__name__!r}?" if near else ""
            return f"expected ranking metrics of RecBole ({known}), got {name!r}{hint}"
    return None


def retriever_seed(config: Config) -> int:
    """Seed of the retriever and of the folds of users: its own one where it is given, else the run's."""
    own = config["retriever_seed"]
    return int(config["seed"] if own is None else own)


def retriever_config(config: Config, **changes: Any) -> RecBoleConfig:
    """RecBole's own Config for the retriever of a run: one evaluation protocol, every key the retriever knows.

    From weak to strong: RecBole's properties, properties/overall.yaml, the retriever's own file in RecBole,
    properties/dataset/, what the user gave, `changes`.

    Args:
        config: the run.
        changes: keys set on top, such as epochs=3.
    """
    name, dataset = config["retriever"], config["dataset"]
    model = retriever_class(name)
    known = host_keys(name, dataset) - {"model", "dataset"}
    own_file = host_dir() / "properties" / "model" / f"{name}.yaml"
    host_own = read_yaml(own_file) if own_file.is_file() else {}
    files = option_files(config["model"], dataset)
    overall = _defaults(files[0])
    data = _defaults(files[-1]) if files[-1].parent.name == "dataset" else {}
    seed = {"seed": retriever_seed(config)}
    values = {**overall, **host_own, **data, **config.given, **seed, **changes}
    values = {key: copy.deepcopy(value) for key, value in values.items() if key in known}
    cross_entropy = not hasattr(model, "input_type") and values.get("loss_type") == "CE"
    if cross_entropy and getattr(model, "type", None) == ModelType.SEQUENTIAL:
        # RecBole refuses its own default sampler under a cross-entropy loss (config/configurator.py:340)
        values.setdefault("train_neg_sample_args", None)
    with _no_command_line():
        host = _QuietConfig(model=model, dataset=dataset, config_dict=values)
    # The Trainer pickles this object: a plain RecBole Config can be read where the plugin is not installed.
    host.__class__ = RecBoleConfig
    return host
