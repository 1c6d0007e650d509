"""Any general or sequential recommender of RecBole as the source of candidates."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from recbole.model.abstract_recommender import AbstractRecommender
from recbole.utils import ModelType, get_model, init_seed
from recbole.utils.argument_list import training_arguments

from recbole_dgr2.data.parts import holdout_lengths
from recbole_dgr2.model.scorer import Kind, Retriever, RetrieverInfo
from recbole_dgr2.safe_load import safe_torch_load
from recbole_dgr2.schema import read_yaml
from recbole_dgr2.system.files import read_json_object
from recbole_dgr2.system.paths import host_dir
from recbole_dgr2.utils import (
    Vocabulary,
    build_trainer,
    keep_interactions,
    sequences_from_dataset,
    split_loaders,
    vocabulary,
)

CHECKPOINT_NAME = "retriever.pth"
KINDS: dict[ModelType, Kind] = {
    ModelType.GENERAL: "general",
    ModelType.TRADITIONAL: "general",
    ModelType.SEQUENTIAL: "sequential",
}
EVALUATION_CELLS = 2**22
"""Scores in one evaluation batch of a general model (RecBole's default is one user a batch on large catalogues)."""


def train_retriever(config: Any, dataset: Any, folder: Path) -> Retriever:
    """Train the recommender `config["model"]` with RecBole's Trainer and keep its best validated weights.

    Args:
        config: RecBole's config for the recommender.
        dataset: `load_dataset(config)`, not split yet; it is not changed.
        folder: Receives the checkpoint (`retriever.pth`, `retriever.json`) and TensorBoard files.

    Raises:
        ValueError: The model is of a kind that is not supported, or the data set is empty or without timestamps.
    """
    config = _own_config(config, dataset, folder)
    sequences_from_dataset(dataset)  # the checks of the data set, before RecBole's less readable ones
    train_data, valid_data, _ = split_loaders(config, dataset)
    if train_data is None:
        raise ValueError(f"data set {dataset.dataset_name}: no user has enough interactions to train on")
    return _fit(config, train_data, valid_data, folder)


def train_holdout_retriever(
    final: Retriever, config: Any, dataset: Any, folder: Path, last_m: int
) -> Retriever:
    """The same recommender without each user's last `last_m` training interactions, for training candidates.

    It is trained for as many epochs as the final retriever's best one and never validated, so neither its
    weights nor its stopping have seen a target of `leave_one_out_rows(sequences, "train", last_m)`. A user keeps
    at least the first training interaction, which is never a target. The id vocabularies are the final ones.

    Args:
        final: From `train_retriever` or `load_retriever`.
        config: The config `final` was made with.
        dataset: As for `train_retriever`.
        folder: Receives the checkpoint; not the folder of the final retriever.
        last_m: At least 1.
    """
    if last_m < 1:
        raise ValueError(f"train_last_m {last_m}: expected at least 1")
    lengths = holdout_lengths(sequences_from_dataset(dataset), last_m)
    return train_part_retriever(final, config, dataset, folder, lengths)


def train_part_retriever(
    final: Retriever, config: Any, dataset: Any, folder: Path, lengths: np.ndarray
) -> Retriever:
    """The same recommender trained on the first `lengths[u]` interactions of each user, int64 [n_users].

    As long as the final retriever's best epoch, without validation; the id vocabularies are the final ones.

    Raises:
        ValueError: no interaction is left to train on.
    """
    config = _part_config(_own_config(config, dataset, folder), final.best_epoch + 1)
    return _fit(config, _part_loader(config, dataset, lengths), None, folder)


def load_part_retriever(path: Path, config: Any, dataset: Any, lengths: np.ndarray) -> Retriever:
    """What `train_part_retriever` left at `path`.

    The model is built over the interactions of its part: graph models keep a matrix of them that is in no checkpoint.
    """
    config = _part_config(_own_config(config, dataset, path.parent), 1)
    return _load(path, config, _part_loader(config, dataset, lengths))


def _part_config(config: Any, epochs: int) -> Any:
    config["epochs"] = epochs
    # RecBole's data set must put every interaction that is left into training.
    config["eval_args"] = {**config["eval_args"], "split": {"RS": [1, 0, 0]}, "group_by": "user"}
    return config


def _part_loader(config: Any, dataset: Any, lengths: np.ndarray) -> Any:
    train_data = None
    if lengths.any():
        train_data, _, _ = split_loaders(config, keep_interactions(dataset, lengths))
    if train_data is None:
        raise ValueError(
            "no training interaction is left for the retriever of the training lists; use a smaller train_last_m"
        )
    return train_data


def load_retriever(path: Path, config: Any, dataset: Any) -> Retriever:
    """A retriever from a RecBole checkpoint; no code of the file is run and no device of it is needed.

    Args:
        path: A `.pth` file that RecBole's Trainer wrote.
        config: RecBole's config for the checkpoint's model, with the checkpoint's hyper-parameters
            (see `checkpoint_options`).
        dataset: `load_dataset(config)`, not split yet; it is not changed.

    Raises:
        ValueError: Not a RecBole checkpoint, another model, or other vocabularies than the data set's.
    """
    config = _own_config(config, dataset, path.parent)
    return _load(path, config, dataset)


def _load(path: Path, config: Any, source: Any) -> Retriever:
    """`source`: an unsplit data set, of which the training part is taken, or the training loader."""
    state = read_checkpoint(path)
    if state["config"]["model"] != config["model"]:
        raise ValueError(f"{path}: holds a {state['config']['model']}, expected a {config['model']}")
    side = path.with_suffix(".json")
    own = vocabulary(getattr(source, "dataset", source))
    if side.exists():
        written = read_json_object(side, "train the retriever again", {"vocabulary": dict})["vocabulary"]
        own.require(Vocabulary(**written), str(path))
    train_data = source if hasattr(source, "dataset") else split_loaders(config, source)[0]
    model = _new_model(config, train_data)
    _restore(model, state, path, own)
    info = RetrieverInfo(config["model"], _kind(config), int(state["epoch"]), own)
    return Retriever(model, config, train_data.dataset, info)


def checkpoint_options(path: Path) -> tuple[str, dict[str, Any]]:
    """The model name of a RecBole checkpoint, and the options of the model and of its training.

    Pass the options to `retriever_config` so that the model is built, and its hold-out twin trained, as it was.
    """
    saved = read_checkpoint(path)["config"]
    name = saved["model"]
    own = host_dir() / "properties" / "model" / f"{name}.yaml"
    keys = {
        "MAX_ITEM_LIST_LENGTH",
        "loss_type",
        *training_arguments,
        *(read_yaml(own) if own.is_file() else ()),
    }
    options = {key: saved[key] for key in sorted(keys) if key in saved}
    if (options.get("train_neg_sample_args") or {}).get("distribution") == "none":
        options["train_neg_sample_args"] = None  # RecBole writes "none" in words, and refuses to read it
    return name, options


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a RecBole checkpoint, on the CPU; ValueError where the file is no such thing."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file, expected a checkpoint written by RecBole's Trainer")
    state = safe_torch_load(path)
    missing = {"config", "epoch", "state_dict", "other_parameter"} - set(
        state if isinstance(state, dict) else ()
    )
    if missing:
        raise ValueError(f"{path}: not a RecBole checkpoint, it lacks {', '.join(sorted(missing))}")
    return state


def _kind(config: Any) -> Kind:
    name, model_type = config["model"], config["MODEL_TYPE"]
    if model_type not in KINDS:
        raise ValueError(
            f"retriever {name}: a {model_type.name.lower()} recommender, expected a general or a sequential one"
        )
    if config["train_stage"] not in (None, "finetune"):
        raise ValueError(
            f"retriever {name}: train_stage {config['train_stage']!r} trains no recommender; "
            "set train_stage to finetune and pre_model_path to the pretrained model"
        )
    return KINDS[model_type]


def _own_config(config: Any, dataset: Any, folder: Path) -> Any:
    """A copy whose files go to `folder`, and that evaluates a general model on many users at a time."""
    config = copy.deepcopy(config)
    config["checkpoint_dir"] = str(folder)
    whole_rows = get_model(config["model"]).full_sort_predict is not AbstractRecommender.full_sort_predict
    if _kind(config) == "general" and whole_rows:
        users = min(max(1, EVALUATION_CELLS // dataset.item_num), 512)
        config["eval_batch_size"] = max(config["eval_batch_size"], users * dataset.item_num)
    return config


def _new_model(config: Any, train_data: Any) -> torch.nn.Module:
    init_seed(config["seed"] + config["local_rank"], config["reproducibility"])
    model = get_model(config["model"])(config, train_data.dataset).to(config["device"])
    scores = getattr(model, "pred_mat", None)
    if isinstance(scores, scipy.sparse.lil_matrix):
        # ItemKNN and AsymKNN keep a list a row: ten times slower to read, pickle and load than the same values as CSR
        model.pred_mat = scores.tocsr()
    return model


def _fit(config: Any, train_data: Any, valid_data: Any, folder: Path) -> Retriever:
    model = _new_model(config, train_data)
    trainer = build_trainer(config, model)
    if config["MODEL_TYPE"] == ModelType.TRADITIONAL:
        valid_data = None  # fitted in one pass: there is nothing to choose by validation
    path = folder / CHECKPOINT_NAME
    trainer.saved_model_file = str(path)
    trainer.fit(train_data, valid_data, saved=True, show_progress=bool(config["show_progress"]))
    trainer.tensorboard.close()
    state = read_checkpoint(path)
    own = vocabulary(train_data.dataset)
    _restore(model, state, path, own)
    info = RetrieverInfo(config["model"], _kind(config), int(state["epoch"]), own)
    path.with_suffix(".json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return Retriever(model, config, train_data.dataset, info)


def _restore(model: torch.nn.Module, state: dict[str, Any], path: Path, own: Vocabulary) -> None:
    """Put a checkpoint's weights into the model; ValueError naming both shapes where they do not fit."""
    expected = {**model.state_dict(), **model.other_parameter()}
    for name, value in {**state["state_dict"], **state["other_parameter"]}.items():
        shape, wanted = getattr(value, "shape", None), getattr(expected.get(name), "shape", None)
        if shape is not None and wanted is not None and tuple(shape) != tuple(wanted):
            raise ValueError(
                f"{path}: {name} is {list(shape)}, but {list(wanted)} for the data set's {own.n_users - 1} users "
                f"and {own.n_items - 1} items; use the data set and options it was trained with"
            )
    try:
        model.load_state_dict(state["state_dict"])
    except RuntimeError as error:
        raise ValueError(f"{path}: does not fit the model, {str(error).splitlines()[-1].strip()}") from error
    device = next(model.parameters()).device
    tensors = (torch.Tensor, torch.nn.Module)
    others = state["other_parameter"].items()
    model.load_other_parameter({k: v.to(device) if isinstance(v, tensors) else v for k, v in others})
