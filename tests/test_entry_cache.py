"""The cache: what is sound is used again, what is not is built again with a warning, nothing half-written stays."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recbole_dgr2.system.cache import (
    Cache,
    Columns,
    copy_file,
    data_fingerprint,
    digest_of,
    link_files,
    write_text,
)

WHAT = {"data": {"x.inter": "abc"}, "retriever": "ItemKNN", "seed": 1}


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Columns:
        self.calls += 1
        return {"item": np.arange(5, dtype=np.int32), "score": np.array([1, 0.5, -np.inf, 2, 3], np.float32)}


def only_table(folder: Path) -> Path:
    (path,) = folder.glob("*.parquet")
    return path


def test_a_table_is_built_once_and_pandas_reads_it(tmp_path: Path) -> None:
    build, cache = Builder(), Cache(tmp_path / "cache")
    first = cache.table("candidates", WHAT, build)
    second = cache.table("candidates", dict(reversed(WHAT.items())), build)
    assert build.calls == 1
    for name in first:
        assert second[name].dtype == first[name].dtype
        assert np.array_equal(second[name], first[name])
    assert pd.read_parquet(only_table(tmp_path / "cache"))["item"].tolist() == [0, 1, 2, 3, 4]
    seal = json.loads(only_table(tmp_path / "cache").with_suffix(".parquet.seal.json").read_text())
    assert seal["description"] == {**WHAT, "format": 1}


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"data": {"x.inter": "abd"}}, {"retriever": "Pop"}, {"more": 1}], ids=str
)
def test_whatever_decides_the_content_is_in_the_key(tmp_path: Path, change: dict[str, object]) -> None:
    build, cache = Builder(), Cache(tmp_path)
    cache.table("candidates", WHAT, build)
    cache.table("candidates", {**WHAT, **change}, build)
    assert build.calls == 2
    assert len(list(tmp_path.glob("*.parquet"))) == 2


def spoil_nothing_but_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def unseal(path: Path) -> None:
    path.with_suffix(".parquet.seal.json").unlink()


def break_seal(path: Path) -> None:
    path.with_suffix(".parquet.seal.json").write_text("{}")


def foreign(path: Path) -> None:
    """A sound entry of another description under this name."""
    other = Cache(path.parent / "other")
    other.table("candidates", {**WHAT, "seed": 9}, Builder())
    source = only_table(path.parent / "other")
    path.write_bytes(source.read_bytes())
    seal = source.with_suffix(".parquet.seal.json").read_text()
    path.with_suffix(".parquet.seal.json").write_text(seal)


@pytest.mark.parametrize(
    "spoil,reason",
    [
        (spoil_nothing_but_one_byte, "checksum differs"),
        (cut, "checksum differs"),
        (empty, "checksum differs"),
        (unseal, "has no seal"),
        (break_seal, "unreadable seal"),
        (foreign, "belongs to other data or options"),
    ],
)
def test_what_is_damaged_or_foreign_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: object, reason: str
) -> None:
    build, cache = Builder(), Cache(tmp_path)
    cache.table("candidates", WHAT, build)
    assert callable(spoil)
    spoil(only_table(tmp_path))
    with caplog.at_level(logging.WARNING):
        columns = cache.table("candidates", WHAT, build)
    assert build.calls == 2
    assert reason in caplog.text
    assert columns["item"].tolist() == [0, 1, 2, 3, 4]
    cache.table("candidates", WHAT, build)
    assert build.calls == 2  # mended


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Columns:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).table("candidates", WHAT, fail)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_program_left_goes_after_a_day(tmp_path: Path) -> None:
    for name, age in ((".part-old", 90_000), (".part-new", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "candidates.parquet").write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_text(tmp_path / "a.txt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".part-new", "a.txt"]


def test_without_a_folder_nothing_is_kept() -> None:
    build = Builder()
    for _ in range(2):
        Cache(None).table("candidates", WHAT, build)
    assert build.calls == 2


def test_the_fingerprint_is_of_content(tmp_path: Path) -> None:
    (tmp_path / "x.inter").write_text("a")
    (tmp_path / "x.item").write_text("b")
    (tmp_path / "y.inter").write_text("c")
    before = data_fingerprint(tmp_path, "x")
    assert sorted(before) == ["x.inter", "x.item"]
    (tmp_path / "x.inter").write_text("A")
    after = data_fingerprint(tmp_path, "x")
    assert before["x.item"] == after["x.item"]
    assert before["x.inter"] != after["x.inter"]
    with pytest.raises(FileNotFoundError, match=r"no atomic file of z, expected z\.inter"):
        data_fingerprint(tmp_path, "z")


def test_digests_ignore_the_order_of_keys() -> None:
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": [1, 2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_linked_files_survive_the_original(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    for _ in range(2):
        link_files([tmp_path / "one"], tmp_path / "there")
    (tmp_path / "one").unlink()
    assert (tmp_path / "there" / "one").read_text() == "1"


def test_a_file_put_onto_itself_stays(tmp_path: Path) -> None:
    """A finished run's own checkpoint or lists, given to a run into the same folder."""
    one = tmp_path / "one"
    one.write_text("1")
    (tmp_path / "alias").symlink_to(tmp_path)
    link_files([tmp_path / "alias" / "one"], tmp_path)
    copy_file(one, tmp_path / "alias" / "one")
    assert one.read_text() == "1" and not one.is_symlink()


def test_a_copy_is_the_runs_own(tmp_path: Path) -> None:
    (tmp_path / "lists.csv").write_text("before")
    for _ in range(2):
        copy_file(tmp_path / "lists.csv", tmp_path / "run" / "lists.csv")
    with (tmp_path / "lists.csv").open("a") as stream:
        stream.write(", after")
    assert (tmp_path / "run" / "lists.csv").read_text() == "before"


@pytest.mark.parametrize("put", [lambda one, there: link_files([one], there.parent), copy_file])
def test_a_file_that_cannot_be_put_leaves_the_old_one(tmp_path: Path, put: Callable[..., None]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "one").write_text("old")
    with pytest.raises(FileNotFoundError):
        put(tmp_path / "one", tmp_path / "there" / "one")
    assert [path.read_text() for path in (tmp_path / "there").iterdir()] == ["old"]
