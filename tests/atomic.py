"""Small atomic files with whatever in them, and a quick run over them without a language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recbole_dgr2.quick_start import run_recbole_dgr2

Interaction = tuple[str, str, Any]


def walks(users: int = 12, length: int = 7, items: int = 20) -> list[Interaction]:
    """User u<n> takes `length` items in a row from a ring of items, so that neighbours are easy to learn."""
    return [
        (f"u{user}", f"i{(3 * user + step) % items}", 1000 * user + step)
        for user in range(users)
        for step in range(length)
    ]


def write(
    folder: Path,
    interactions: Sequence[Interaction],
    item_lines: Sequence[str] | None = None,
    head: str = "user_id:token\titem_id:token\ttimestamp:float",
) -> Path:
    """The data set `own` below `folder`; `item_lines` with the header first."""
    (folder / "own").mkdir(parents=True, exist_ok=True)
    lines = [head, *("\t".join(map(str, row)) for row in interactions)]
    (folder / "own" / "own.inter").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if item_lines is not None:
        text = "".join(f"{line}\n" for line in item_lines)
        (folder / "own" / "own.item").write_text(text, encoding="utf-8")
    return folder


def run(folder: Path, **keys: Any) -> dict[str, Any]:
    """Retriever and baselines over the data set `own` below `folder`."""
    given = {
        "data_path": str(folder),
        "checkpoint_dir": str(folder / "saved"),
        "stages": [],
        "threads": 1,
        "use_gpu": False,
        "show_progress": False,
        "n_candidates": 5,
        "topk": [1, 3, 5],
        "valid_metric": "NDCG@5",
        "train_last_m": 2,
        "bootstrap_samples": 100,
        **({"k": 8} if keys.get("retriever", "ItemKNN") == "ItemKNN" else {}),
        **keys,
    }
    return run_recbole_dgr2(dataset="own", config_dict=given)
