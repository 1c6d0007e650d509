"""The file of a study: read whole or refused, written with one line an entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recbole_dgr2.system.files import read_json_object

SETTINGS = ("lists", "sample", "sample_seed", "max_new_tokens")
"""What entries of one file must share."""
KEYS = (
    *("command", "hardware", "versions", "dataset", "retriever", "runs", "seeds"),
    *("n_candidates", "n_users", "n_hits", "batch", "timed", "options", "variant_options"),
    *("entries", "speeds", *SETTINGS),
)
"""What its page needs."""


def read_study(path: Path) -> dict[str, Any]:
    """The file of a study.

    Raises:
        FileNotFoundError, ValueError: no such file, or not one of a study.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; run the command without --render first")
    return read_json_object(path, "so it is no file of a study of this version; give another --output", KEYS)


def is_study(path: Path) -> bool:
    """Whether a JSON file is one of a study."""
    return {"entries", "speeds", "sample_seed"} <= set(read_json_object(path, "mend or delete it"))


def compact_json(content: Mapping[str, Any]) -> str:
    """JSON with one line a key, and one an entry of a list of objects."""

    def shown(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(f"  {_dump(one)}" for one in value) + "\n ]"
        return _dump(value)

    return "{\n" + ",\n".join(f" {_dump(key)}: {shown(value)}" for key, value in content.items()) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
