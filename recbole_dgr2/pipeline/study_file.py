"""The file of a study: read whole or refused, written with one line an entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recbole_dgr2.system.files import Kinds, kind_problem, read_json_object

SETTINGS = ("lists", "sample", "sample_seed", "max_new_tokens")
"""What entries of one file must share."""
_NUMBER, _NONE = (int, float), type(None)
KINDS: Kinds = {
    **dict.fromkeys(("command", "hardware", "dataset", "retriever", "lists"), (str,)),
    **dict.fromkeys(("versions", "options", "variant_options"), (dict,)),
    **dict.fromkeys(("runs", "seeds", "entries", "speeds"), (list,)),
    **dict.fromkeys(("n_candidates", "n_users", "n_hits", "batch", "timed", "max_new_tokens"), (int,)),
    **dict.fromkeys(("sample", "sample_seed"), (int,)),
}
ENTRY_KINDS: Kinds = {
    **dict.fromkeys(("name", "decoder", "ranks"), (str,)),
    **dict.fromkeys(("weights", "rows", "teacher", "varies"), (str, _NONE)),
    **dict.fromkeys(("all", "hits"), (dict,)),
    **dict.fromkeys(("valid", "hits_valid"), (dict, _NONE)),
    **dict.fromkeys(("copied", "tokens_per_pass", "acceptance", "equal_to_ar", "seconds"), (*_NUMBER, _NONE)),
    "seed": (int,),
}
SPEED_KINDS: Kinds = {"name": (str,), "seed": (int,), "decoders": (dict,)}
"""What the page needs of a file, of one of its entries, and of the speeds of one model."""
CURE = "so it is no file of a study of this version; give another --output"


def read_study(path: Path) -> dict[str, Any]:
    """The file of a study.

    Raises:
        FileNotFoundError, ValueError: no such file, or not one of a study.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; run the command without --render first")
    content = read_json_object(path, CURE, KINDS)
    problems = (
        *(_entry_problem(entry, f"entries[{place}]") for place, entry in enumerate(content["entries"])),
        *(kind_problem(one, SPEED_KINDS, f"speeds[{place}]") for place, one in enumerate(content["speeds"])),
    )
    for problem in filter(None, problems):
        raise ValueError(f"{path}: {problem}; {CURE}")
    return content


def _entry_problem(entry: Any, where: str) -> str | None:
    problem = kind_problem(entry, ENTRY_KINDS, where)
    if problem is None and not set(entry["ranks"] + (entry["rows"] or "")) <= set("0123456789 "):
        return f"{where} has ranks or rows that are no numbers"
    return problem


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
