"""Early checks of RecBole's atomic files: RecBole skips a missing column silently and reads empty files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recbole_dgr2.schema import nearest, read_yaml
from recbole_dgr2.system.paths import host_dir

TEXT_FIELDS = ("title_field", "category_field", "brand_field")


def check_atomic_files(config: Any) -> None:
    """Check that a data set is there, is not empty, and has every column that will be read.

    Args:
        config: anything with `config[key]` for dataset, data_path (the data set's own folder), load_col,
            field_separator, benchmark_filename and the text fields.
    Raises:
        FileNotFoundError: no such data set or file.
        ValueError: an empty file, or a column that is missing.
    """
    name, folder = config["dataset"], Path(config["data_path"])
    if not folder.is_dir():
        _check_downloadable(name, folder)
        return
    separator = config["field_separator"] or "\t"
    parts = config["benchmark_filename"]
    for suffix, columns in (config["load_col"] or {}).items():
        names = (
            [f"{name}.{part}.{suffix}" for part in parts]
            if parts and suffix == "inter"
            else [f"{name}.{suffix}"]
        )
        for file in names:
            _check_columns(folder / file, columns or [], separator, f"load_col[{suffix}]")
    for key in TEXT_FIELDS:
        if config[key] is not None:
            _check_columns(folder / f"{name}.item", [config[key]], separator, key)


def _check_downloadable(name: str, folder: Path) -> None:
    """RecBole downloads the data sets of its own list into an absent folder; any other name is a mistake."""
    urls = read_yaml(host_dir() / "properties" / "dataset" / "url.yaml")
    if name in urls:
        return
    beside = (
        [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    )
    near = nearest(name, [*urls, *beside, "ml-100k"])
    hint = f"; the nearest known name is {near!r}" if near else ""
    raise FileNotFoundError(f"dataset: no data set {name!r}, expected {folder / name}.inter{hint}")


def _check_columns(path: Path, columns: list[str], separator: str, key: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (asked for by {key})")
    with path.open(encoding="utf-8") as lines:
        header = lines.readline().rstrip("\n")
        has_rows = bool(lines.readline().strip())
    if not header.strip() or not has_rows:
        raise ValueError(f"{path}: the file is empty, expected a header 'field:type ...' and rows")
    present = [field.partition(":")[0] for field in header.split(separator)]
    for column in columns:
        if column not in present:
            near = nearest(column, present)
            hint = f", the nearest is {near!r}" if near else ""
            raise ValueError(
                f"{path}: no column {column!r} (asked for by {key}); it has {', '.join(present)}{hint}"
            )
