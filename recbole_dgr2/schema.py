"""The options of the plugin, read from the comments of properties/*.yaml: type, meaning, range of every key.

The comment of a line `key: value  # (type) meaning, range RANGE` is the only place where an option is
described: the checks of user input and the command line's help both come from it. `type` joins int, float,
bool, str, list, dict, null and literal words with |. RANGE is an interval of numbers such as `(0, 1]` or a set
of words such as `{causal, block}`; for a list it holds for the elements.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from recbole_dgr2.system.paths import properties_dir

_LINE = re.compile(r"^(?P<key>\w+):\s.*?\s+# \((?P<types>[\w|]+)\) (?P<text>.+)$")
_RANGE = re.compile(r", range (?P<range>[\[({].*[\])}])$")
_PYTHON_TYPES: dict[str, type] = {t.__name__: t for t in (int, float, bool, str, list, dict)}


class YamlLoader(yaml.SafeLoader):
    """YAML as RecBole reads it (1e-3 is a number), without the tags that build Python objects."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
        r"|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


@dataclass(frozen=True)
class Option:
    """One key of properties/; `range` is the text of an interval or of a set of words."""

    key: str
    default: Any
    types: tuple[str, ...]
    meaning: str
    range: str | None

    @property
    def is_text(self) -> bool:
        """Whether every value is text, so that what a user typed is kept letter for letter."""
        return "str" in self.types

    def expected(self) -> str:
        """What a value must be, in words."""
        words = " or ".join(self.types)
        if self.range is None:
            return words
        if not self.range.startswith("{"):
            return f"{words} in {self.range}"
        one = f"one of {self.range[1:-1]}"
        return f"a list, such as [{self.words()[0]}], each {one}" if "list" in self.types else one

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, in words, or None."""
        if value == "" and self.is_text:
            return f"expected {self.expected()}, got an empty text"
        if not self._type_fits(value):
            return f"expected {self.expected()}, got {type(value).__name__} {value!r}"
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if not self._in_range(part):
                return f"expected {self.expected()}, got {part!r}{self._nearest(part)}"
        return None

    def _type_fits(self, value: Any) -> bool:
        if value is None:
            return "null" in self.types
        if isinstance(value, str) and value in self.types and value not in _PYTHON_TYPES:
            return True
        if isinstance(value, bool):
            return "bool" in self.types
        if isinstance(value, int) and "float" in self.types:
            return True
        return any(isinstance(value, _PYTHON_TYPES[name]) for name in self.types if name in _PYTHON_TYPES)

    def _in_range(self, value: Any) -> bool:
        if self.range is None or value is None or (isinstance(value, str) and value in self.types):
            return True
        if self.range.startswith("{"):
            return value in self.words()
        low, high = (float(end) for end in self.range[1:-1].split(","))
        if not math.isfinite(value):
            return False
        above = value >= low if self.range[0] == "[" else value > low
        below = value <= high if self.range[-1] == "]" else value < high
        return above and below

    def words(self) -> list[str]:
        """The words of a set range, else an empty list."""
        return self.range[1:-1].split(", ") if self.range and self.range.startswith("{") else []

    def _nearest(self, value: Any) -> str:
        match = nearest(str(value), self.words())
        return f"; did you mean {match!r}?" if match else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when nothing is near."""
    by_lower = {name.lower(): name for name in known}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[match[0]] if match else None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values.

    Raises:
        FileNotFoundError, ValueError: in one line, with the file's name.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such config file")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}: not valid YAML{where}: {getattr(error, 'problem', error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected lines 'key: value', got a {type(content).__name__}")
    return content


@lru_cache
def read_options(path: Path) -> tuple[Option, ...]:
    """The options of one file of properties/, in its order.

    Raises:
        ValueError: a line that does not follow the format.
    """
    values = read_yaml(path)
    options = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(
                f"{path}:{number}: expected 'key: value  # (type) meaning, range ...', got {line!r}"
            )
        limits = _RANGE.search(match["text"])
        meaning = match["text"][: limits.start()] if limits else match["text"]
        options.append(
            Option(
                key=match["key"],
                default=values[match["key"]],
                types=tuple(match["types"].split("|")),
                meaning=meaning,
                range=limits["range"] if limits else None,
            )
        )
    return tuple(options)


def option_files(model: str, dataset: str | None) -> list[Path]:
    """The files of properties/ that make up a run, later ones winning."""
    folder = properties_dir()
    files = [folder / "overall.yaml", folder / "model" / f"{model}.yaml"]
    files += sorted((folder / "quick_start_config").glob("*.yaml"))
    own = folder / "dataset" / f"{dataset}.yaml"
    return [*files, own] if dataset and own.is_file() else files


def options_of(model: str, dataset: str | None) -> dict[str, Option]:
    """Every option of the plugin by key; a data set's file overrides defaults."""
    return {option.key: option for path in option_files(model, dataset) for option in read_options(path)}


def parse_text(text: str, option: Option | None) -> Any:
    """Turn text of the command line (or a string of config_dict) into a value, without evaluating it.

    Text means what it would mean in a YAML file; keys whose type is text keep it letter for letter. (RecBole
    calls `eval` on it, config/configurator.py:131, so that "1+1" becomes 2 and code would run.)
    """
    if text.strip().lower() in ("none", "null", "~"):
        return text if option is not None and "null" not in option.types else None
    if option is not None and option.is_text:
        return text
    try:
        value = yaml.load(text, Loader=YamlLoader)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        return value if text[:1] in "'\"" else text
    return value if isinstance(value, (bool, int, float)) or text.strip()[:1] in ("[", "{") else text
