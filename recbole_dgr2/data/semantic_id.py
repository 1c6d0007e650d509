"""Semantic IDs: an item's name as a few tokens, coarse to fine, such as `<a_12><b_7><c_200><d_3>`.

An index file holds them as a JSON object, external item id to list of tokens; files of other programs load as well, as
long as they spell the tokens so: prompts, traces and their checks know an item in a text by this spelling.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.system.cache import write_text
from recbole_dgr2.system.files import read_json_object

PADDING = -1
"""Code of RecBole's padding item, which has no semantic ID."""
_TOKEN = re.compile(r"(?P<before>.*?)(?P<number>0|[1-9][0-9]{0,8})(?P<after>\D*)", re.DOTALL)
_EXAMPLE = '{"<external item id>": ["<a_12>", "<b_7>", "<c_200>", "<d_3>"], ...}'

Spelling = tuple[tuple[str, str], ...]
"""What stands before and after the number of a token, for each level."""


def spelling_of(levels: int) -> Spelling:
    """`<a_..>`, `<b_..>` and so on; ValueError beyond 26 levels."""
    if not 1 <= levels <= len(string.ascii_lowercase):
        raise ValueError(f"levels {levels}: expected 1 to {len(string.ascii_lowercase)}")
    return tuple((f"<{letter}_", ">") for letter in string.ascii_lowercase[:levels])


@dataclass(frozen=True)
class SemanticIds:
    """A code of L numbers for every item, no two alike.

    codes: int64 [n_items, L] by internal id; row 0 (padding) is PADDING.

    Raises:
        ValueError: a negative code, or two items with one code; items are named by internal id.
    """

    codes: np.ndarray
    spelling: Spelling

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.shape[1] != len(self.spelling) or len(self.codes) < 2:
            shape = list(self.codes.shape)
            raise ValueError(
                f"semantic IDs: expected codes [n_items >= 2, {len(self.spelling)}], got {shape}"
            )
        if (self.codes[0] != PADDING).any() or (self.codes[1:] < 0).any():
            raise ValueError("semantic IDs: expected codes >= 0, and PADDING in row 0 alone")
        if len(self._items) < len(self.codes) - 1:
            first = next(
                (item, self._items[code]) for code, item in self._pairs() if self._items[code] != item
            )
            raise ValueError(
                f"semantic IDs: items {first[0]} and {first[1]} have the same, {self.text(first[0])}"
            )

    def __len__(self) -> int:
        """Items, padding included."""
        return len(self.codes)

    @property
    def levels(self) -> int:
        """Tokens of an item, L."""
        return len(self.spelling)

    def tokens(self, item: int) -> tuple[str, ...]:
        """The tokens of an item, coarsest first. Raises ValueError for padding and unknown items."""
        if not 0 < item < len(self.codes):
            raise ValueError(f"item {item}: no semantic ID, expected 1..{len(self.codes) - 1}")
        numbers = self.codes[item].tolist()
        return tuple(
            f"{before}{number}{after}" for (before, after), number in zip(self.spelling, numbers, strict=True)
        )

    def text(self, item: int) -> str:
        """The tokens of an item as one word."""
        return "".join(self.tokens(item))

    def texts(self) -> dict[int, str]:
        """The semantic ID of every item as text, by internal id."""
        return {item: self.text(item) for item in range(1, len(self.codes))}

    def added_tokens(self) -> list[str]:
        """Every token that an item has, level by level, codes rising: what a tokenizer needs to know."""
        found: dict[str, None] = {}
        for level, (before, after) in enumerate(self.spelling):
            used = np.unique(self.codes[1:, level]).tolist()
            found.update(dict.fromkeys(f"{before}{number}{after}" for number in used))
        return list(found)

    def item_of(self, tokens: Sequence[str]) -> int | None:
        """The item with these tokens, None where there is none."""
        return self._by_text.get("".join(tokens)) if len(tokens) == self.levels else None

    @cached_property
    def digest(self) -> str:
        """Stands for all codes and their spelling; a checkpoint trained with other IDs is recognised by it."""
        words = json.dumps([self.spelling, self.codes.shape]).encode()
        return hashlib.sha256(words + self.codes.astype("<i8").tobytes()).hexdigest()

    @cached_property
    def _items(self) -> dict[tuple[int, ...], int]:
        return dict(self._pairs())

    @cached_property
    def _by_text(self) -> dict[str, int]:
        return {text: item for item, text in self.texts().items()}

    def _pairs(self) -> list[tuple[tuple[int, ...], int]]:
        return [(tuple(code), item) for item, code in enumerate(self.codes[1:].tolist(), 1)]


def write_index(path: Path, sids: SemanticIds, item_tokens: Sequence[str]) -> None:
    """Write an index file, whole or not at all.

    Args:
        path: the file.
        sids: what to write.
        item_tokens: external item id by internal id, padding first.
    """
    entries = (
        f"{json.dumps(str(item_tokens[item]), ensure_ascii=False)}: {json.dumps(sids.tokens(item))}"
        for item in range(1, len(sids))
    )
    write_text(path, "{\n" + ",\n".join(entries) + "\n}\n")


def read_index(path: Path, item_tokens: Sequence[str]) -> SemanticIds:
    """Read an index file for the items of a data set; entries of other items are left out.

    Keys are external item ids, as in the data set's .inter and .item files, never positions.

    Args:
        path: the file.
        item_tokens: external item id by internal id, padding first.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such an object, an item without an entry, lists of different lengths, a token that is not spelt
            `<a_12>`, `<b_12>` and so on by its level, or two items with the same tokens; the item is named.
    """
    entries = _read_object(path)
    wanted = [str(token) for token in item_tokens[1:]]
    missing = [token for token in wanted if token not in entries]
    if missing:
        keys = ", ".join(repr(key) for key in list(entries)[:3]) or "none"
        raise ValueError(
            f"{path}: no entry for item {missing[0]!r}, nor for {len(missing) - 1} others of {len(wanted)} items; "
            f"keys are the item ids of the data set, the file has {keys}"
        )
    levels = len(_tokens(path, wanted[0], entries[wanted[0]]))
    spelling = spelling_of(levels)
    codes = np.full((len(item_tokens), levels), PADDING, dtype=np.int64)
    seen: dict[tuple[int, ...], str] = {}
    for item, name in enumerate(wanted, 1):
        tokens = _tokens(path, name, entries[name])
        if len(tokens) != levels:
            raise ValueError(
                f"{path}: item {name!r} has {len(tokens)} tokens, {wanted[0]!r} has {levels}; expected equally many"
            )
        parts = [_parse(path, name, token) for token in tokens]
        for level, (spelt, _) in enumerate(parts):
            if spelt != spelling[level]:
                expected = f"{parts[level][1]}".join(spelling[level])
                raise ValueError(
                    f"{path}: item {name!r}: token {level + 1} is {tokens[level]!r}, expected {expected!r}; spell the "
                    "tokens <a_..>, <b_..> and so on"
                )
        codes[item] = [number for _, number in parts]
        twin = seen.setdefault(tuple(codes[item].tolist()), name)
        if twin != name:
            raise ValueError(f"{path}: items {twin!r} and {name!r} have the same tokens {''.join(tokens)}")
    return SemanticIds(codes, spelling)


def _read_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"semantic IDs: no file {path}; expected an index file, {_EXAMPLE}")
    return read_json_object(path, f"expected {_EXAMPLE}")


def _tokens(path: Path, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(token, str) for token in value):
        raise ValueError(f"{path}: item {name!r} has {str(value)[:60]!r}; expected a list of tokens")
    return value


def _parse(path: Path, name: str, token: str) -> tuple[tuple[str, str], int]:
    match = _TOKEN.fullmatch(token)
    if match is None or not match["before"] or match["before"][-1:].isdigit() or token.split() != [token]:
        raise ValueError(
            f"{path}: item {name!r}: {token!r} is no token; expected text around a number without leading zeros, such "
            "as <a_12>"
        )
    return (match["before"], match["after"]), int(match["number"])
