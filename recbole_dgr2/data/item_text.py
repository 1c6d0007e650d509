"""Item text: titles, categories and brands of an atomic `.item` file, by internal item id.

RecBole's own reader splits titles into token ids and trips over quotes, so the file is read here directly, as plain
text, and matched to RecBole's vocabulary by the external item token. HTML entities become the characters they stand
for; an entry that is empty, or says so (`nan`, `None`, `null`, `[]`), is missing.

Categories come in many forms, told apart by their look, in this order:
  ['Beauty', 'Hair Care'] or "Beauty", "Hair"   a list of JSON, Python or numpy; lists inside it are joined to one
  [Beauty, Hair Care]                           parts between commas, in brackets
  Beauty > Hair Care, Beauty|Hair Care          parts between > or |
  Food, Coffee & Tea                            parts between commas followed by a space
  Home Floor_Lamps                              words of a column of type token_seq, _ for a space within one
  12.0 7.0                                      numbers of a column of type float_seq or float, whole ones without .0
  Coffee & Tea                                  one category, in a column of any other type
No category is listed twice; the last one is taken for the narrowest.
"""

from __future__ import annotations

import ast
import csv
import difflib
import html
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

UNKNOWN = "unknown"
_MISSING = ("", "nan", "NaN", "None", "null", "[]")
_QUOTES = ("'", '"')
_BETWEEN_QUOTES = re.compile(r"""(?<=['"])\s+(?=['"])""")
"""Numpy writes lists of texts without commas, which Python would join to one text."""
_UNREADABLE = (
    pd.errors.ParserError,
    pd.errors.ParserWarning,
    pd.errors.EmptyDataError,
    UnicodeDecodeError,
)


@dataclass(frozen=True)
class ItemFields:
    """Column names of the `.item` file that hold text; None where the data set has no such column."""

    title: str | None = None
    category: str | None = None
    brand: str | None = None

    def named(self) -> dict[str, str]:
        """The columns that are set, as {role: column name}."""
        roles = {"title": self.title, "category": self.category, "brand": self.brand}
        return {role: column for role, column in roles.items() if column}


@dataclass(frozen=True)
class ItemText:
    """Text of every item, indexed by internal id (index 0 is RecBole's padding item).

    Items without a title, category or brand hold "", () and "": callers never see a missing entry. `sids` holds the
    semantic IDs, such as "<a_12><b_3>", of the items that have one; None where the run has none.
    """

    titles: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]
    brands: tuple[str, ...]
    sids: Mapping[int, str] | None = None

    def __len__(self) -> int:
        return len(self.titles)

    def title(self, item: int) -> str:
        """A title that is never empty: the item's own, else brand and narrowest category, else a placeholder."""
        if self.titles[item]:
            return self.titles[item]
        parts = [self.brands[item], self.categories[item][-1] if self.categories[item] else ""]
        return " ".join(part for part in parts if part) or f"{UNKNOWN} item"

    def sid(self, item: int) -> str:
        """The semantic ID of an item; empty where it has none."""
        return (self.sids or {}).get(item, "")

    def document(self, item: int) -> str:
        """Everything that is known of an item in words, for text similarity and for the tokenizer's corpus."""
        return " ".join((self.titles[item], " ".join(self.categories[item]), self.brands[item])).strip()


def load_item_text(path: Path, fields: ItemFields, item_tokens: Sequence[str]) -> ItemText:
    """Read the `.item` file at `path` for the items in `item_tokens` (internal id -> external token).

    Without any text column the file need not exist and every item gets empty text. An item that has interactions but
    no row in the file has empty text as well.

    Raises:
        FileNotFoundError: a text column is configured and the file is absent.
        ValueError: the file is empty, has no such column (the nearest is named), or names an item twice.
    """
    if not fields.named():
        return _empty(len(item_tokens))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file, but title_field, category_field or brand_field names a column of it; "
            "add the file or set these keys to null"
        )
    table, types = _read_table(path)
    rows = _rows_by_item(path, table, item_tokens)
    columns = {role: table[_column(path, table, name)] for role, name in fields.named().items()}
    text = {
        role: ["" if row < 0 else _clean(values.iat[row]) for row in rows] for role, values in columns.items()
    }
    blank = [""] * len(item_tokens)
    kind = types.get(fields.category or "", "")
    return ItemText(
        titles=tuple(text.get("title", blank)),
        categories=tuple(split_categories(value, kind) for value in text.get("category", blank)),
        brands=tuple(text.get("brand", blank)),
    )


def _empty(size: int) -> ItemText:
    return ItemText(titles=("",) * size, categories=((),) * size, brands=("",) * size)


def split_categories(value: str, kind: str) -> tuple[str, ...]:
    """The categories that one entry lists; see the top of this module for the forms.

    Args:
        value: the entry, its HTML entities resolved.
        kind: RecBole's type of the column, such as token_seq; empty where the header has none (as token_seq).
    """
    parts = _listed(value)
    if parts is None:
        parts = [part.replace("_", " ") for part in _parts(value, kind)]
    cleaned = (" ".join(part.split()) for part in parts)
    return tuple(dict.fromkeys(part for part in cleaned if part not in _MISSING))


def _listed(value: str) -> list[str] | None:
    """Texts of a list as JSON or Python write it, brackets or not; None where `value` is no such list."""
    bracketed = _bracketed(value)
    if not bracketed and not (value[:1] == value[-1:] and value[:1] in _QUOTES):
        return None
    text = _BETWEEN_QUOTES.sub(", ", value if bracketed else f"[{value}]")
    for read in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of backslashes, which are text here
                return list(_texts(read(text)))
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # not of this language
            continue
    return None


def _bracketed(value: str) -> bool:
    return value.startswith("[") and value.endswith("]")


def _texts(value: Any) -> Iterator[str]:
    """All entries of a list and of the lists inside it, as text."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)
    elif value is not None:
        yield str(value)


def _parts(value: str, kind: str) -> list[str]:
    """The parts of an entry that is no list of quoted texts."""
    if _bracketed(value):
        return value[1:-1].split(",")
    if re.search(r"[>|]", value):
        return re.split(r"[>|]", value)
    if re.search(r",\s", value):
        return re.split(r",\s+", value)
    if kind in ("float", "float_seq"):
        return [re.sub(r"\.0*$", "", number) for number in value.split()]
    return value.split() if kind in ("token_seq", "") else [value]


def _clean(value: str) -> str:
    """An entry without HTML entities (Amazon's own files escape some twice) and spaces around it; "" if missing."""
    text = html.unescape(html.unescape(value)).replace("\xa0", " ").strip()
    return "" if text in _MISSING else text


def _read_table(path: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The file's columns as text, and their types by name."""
    if path.stat().st_size == 0:
        raise ValueError(
            f"{path}: the file is empty; expected a header line such as item_id:token<TAB>title:token_seq"
        )
    # Titles hold stray quotes far more often than quoted tabs: take quotes as text unless the columns then disagree.
    for quoting in (csv.QUOTE_NONE, csv.QUOTE_MINIMAL):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error", pd.errors.ParserWarning
                )  # pandas drops surplus columns with one
                table = pd.read_csv(
                    path, sep="\t", dtype=str, keep_default_na=False, quoting=quoting, index_col=False
                )
        except _UNREADABLE as error:
            failure = str(error).strip().splitlines()[-1]
            continue
        named = [name.partition(":") for name in table.columns]
        table.columns = [name for name, _, _ in named]
        return table, {name: kind for name, _, kind in named}
    raise ValueError(f"{path}: not a table of tab-separated columns ({failure}); expected one line an item")


def _column(path: Path, table: pd.DataFrame, name: str) -> str:
    if name in table.columns:
        return name
    near = difflib.get_close_matches(name, table.columns, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{path}: no column {name!r}; it has {', '.join(table.columns)}{hint}")


def _rows_by_item(path: Path, table: pd.DataFrame, item_tokens: Sequence[str]) -> list[int]:
    tokens = table[_column(path, table, "item_id")]
    doubled = tokens[tokens.duplicated()]
    if len(doubled):
        raise ValueError(
            f"{path}: item {doubled.iat[0]!r} stands on more than one line; expected one line an item"
        )
    row_of = {token: row for row, token in enumerate(tokens)}
    return [row_of.get(token, -1) for token in item_tokens]
