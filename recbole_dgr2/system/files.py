"""Files that are read whole, or refused in one line that names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_json_object(path: Path, cure: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Args:
        path: the file.
        cure: ends the error's line: what to do about a file that holds none, or what it should hold.
        keys: what the object has to have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, no object, or a key that it lacks.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {cure}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a JSON {type(content).__name__}, not an object; {cure}")
    missing = [key for key in keys if key not in content]
    if missing:
        raise ValueError(f"{path}: lacks {missing[0]!r}; {cure}")
    return content
