"""Files that are read whole, or refused in one line that names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Kinds = Mapping[str, type | tuple[type, ...]]
"""What an object has to have, and of which type; a bool counts as no number."""


def read_json_object(path: Path, cure: str, kinds: Kinds | None = None) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Args:
        path: the file.
        cure: ends the error's line: what to do about a file that holds none, or what it should hold.
        kinds: what the object has to have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, no object, a key that it lacks, or a value of another type.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {cure}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a JSON {type(content).__name__}, not an object; {cure}")
    problem = kind_problem(content, kinds or {})
    if problem:
        raise ValueError(f"{path}: {problem}; {cure}")
    return content


def kind_problem(values: Any, kinds: Kinds, where: str = "") -> str | None:
    """What keeps a JSON value from being an object of these kinds, in words, or None; `where`: what it is called."""
    if not isinstance(values, dict):
        return f"{where} is {values!r}, no object"
    for key, kind in kinds.items():
        if key not in values:
            return f"{where} lacks {key!r}".lstrip()
        if not isinstance(values[key], kind) or (isinstance(values[key], bool) and kind is not bool):
            expected = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            return f"{where}.{key} is {values[key]!r}, expected {expected}".lstrip(".")
    return None
