"""A small random data set and RecBole configs for the tests of retrievers and candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from recbole.config import Config as RecBoleConfig

from recbole_dgr2.config import Config, retriever_config

TRANSFORMER = {"hidden_size": 8, "inner_size": 16, "n_layers": 1, "n_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "ItemKNN": {"k": 10},
    "BPR": {"embedding_size": 8, "learning_rate": 0.05},
    "LightGCN": {"embedding_size": 8, "n_layers": 1, "learning_rate": 0.05},
    "NeuMF": {"mf_embedding_size": 4, "mlp_embedding_size": 4, "mlp_hidden_size": [8]},
    "GRU4Rec": {"embedding_size": 8, "hidden_size": 8, "num_layers": 1},
    "SASRec": {**TRANSFORMER, "learning_rate": 0.01},
    "BERT4Rec": TRANSFORMER,
}


def write_interactions(
    folder: Path, lengths: list[int], n_items: int, seed: int = 0, name: str = "small"
) -> Path:
    """Atomic files: user `u<i>` has `lengths[i]` different items, popular ones more often, many equal times."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, n_items + 1)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows = []
    for user, length in enumerate(lengths):
        items = rng.choice(n_items, size=length, replace=False, p=weight / weight.sum())
        times = np.sort(rng.integers(0, 6, size=length)) + 1_400_000_000
        rows += [f"u{user}\ti{i}\t{rng.integers(1, 6)}\t{t}" for i, t in zip(items, times, strict=True)]
    lines += [rows[i] for i in rng.permutation(len(rows))]
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / f"{name}.inter").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def run_config(retriever: str, data_path: Path, **options: Any) -> Config:
    """A run over the data set `small` with a small retriever."""
    settings = {
        **SMALL.get(retriever, {}),
        "retriever": retriever,
        "data_path": str(data_path),
        "checkpoint_dir": str(data_path / "saved"),
        "MAX_ITEM_LIST_LENGTH": 6,
        "epochs": 2,
        "show_progress": False,
        "use_gpu": False,
        "state": "ERROR",
        "metrics": ["Recall", "MRR", "NDCG", "Hit", "Precision", "ItemCoverage", "AveragePopularity"],
        **options,
    }
    return Config(dataset="small", config_dict=settings)


def recbole_config(retriever: str, data_path: Path, **options: Any) -> RecBoleConfig:
    """RecBole's own Config for the retriever of such a run."""
    return retriever_config(run_config(retriever, data_path, **options))
