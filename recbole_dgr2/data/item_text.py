"""Item text: titles, categories and brands of an atomic `.item` file, by internal item id.

RecBole's own reader splits titles into token ids and trips over quotes, so the file is read here directly, as plain
text, and matched to RecBole's vocabulary by the external item token.
"""

from __future__ import annotations

import csv
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

UNKNOWN = "unknown"
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

    Items without a title, category or brand hold "", () and "": callers never see a missing entry.
    """

    titles: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]
    brands: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.titles)

    def title(self, item: int) -> str:
        """A title that is never empty: the item's own, else brand and narrowest category, else a placeholder."""
        if self.titles[item]:
            return self.titles[item]
        parts = [self.brands[item], self.categories[item][-1] if self.categories[item] else ""]
        return " ".join(part for part in parts if part) or f"{UNKNOWN} item"

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
    table = _read_table(path)
    rows = _rows_by_item(path, table, item_tokens)
    columns = {role: table[_column(path, table, name)] for role, name in fields.named().items()}
    text = {
        role: ["" if row < 0 else str(values.iat[row]).strip() for row in rows]
        for role, values in columns.items()
    }
    blank = [""] * len(item_tokens)
    return ItemText(
        titles=tuple(text.get("title", blank)),
        categories=tuple(tuple(_category_words(value)) for value in text.get("category", blank)),
        brands=tuple(text.get("brand", blank)),
    )


def _empty(size: int) -> ItemText:
    return ItemText(titles=("",) * size, categories=((),) * size, brands=("",) * size)


def _category_words(value: str) -> list[str]:
    # RecBole's token_seq separates by spaces; data sets write spaces inside one category as underscores.
    return [word.replace("_", " ") for word in value.split()]


def _read_table(path: Path) -> pd.DataFrame:
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
        table.columns = [name.split(":")[0] for name in table.columns]
        return table
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
