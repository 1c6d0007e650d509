"""The file of a study is read whole or refused in one line, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.pipeline.study_file import read_study
from recbole_dgr2.study import main
from tests.toy_run import ROOT

FILES = sorted((ROOT / "results").glob("beauty_*.json"))


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return read_study(ROOT / "results" / "beauty_stages.json")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_in_results_are_read(path: Path) -> None:
    assert read_study(path)["entries"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("entries", None, "entries is None"),
        ("entries", {}, "entries is {}"),
        ("entries", [1], r"entries\[0\] is 1, no object"),
        ("entries", [{}], r"entries\[0\] lacks 'name'"),
        ("runs", None, "runs is None"),
        ("n_hits", "ten", "n_hits is 'ten'"),
        ("seeds", "x", "seeds is 'x'"),
        ("speeds", [{"name": "a", "seed": 1, "decoders": None}], r"speeds\[0\]\.decoders is None"),
    ],
)
def test_a_value_of_another_kind(
    content: dict[str, Any], tmp_path: Path, key: str, value: Any, words: str
) -> None:
    refused({**content, key: value}, tmp_path, words)


@pytest.mark.parametrize(
    "key", ["name", "decoder", "ranks", "rows", "all", "hits", "valid", "copied", "seconds"]
)
@pytest.mark.parametrize("value", [["x"], True, "x"], ids=["list", "bool", "text"])
def test_an_entry_of_another_kind(content: dict[str, Any], tmp_path: Path, key: str, value: Any) -> None:
    if (key, value) in (("name", "x"), ("decoder", "x")):
        return
    entries = [*content["entries"][:-1], {**content["entries"][-1], key: value}]
    refused({**content, "entries": entries}, tmp_path, rf"entries\[{len(entries) - 1}\]")


def refused(content: dict[str, Any], folder: Path, words: str) -> None:
    path = folder / "study.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{words}.*no file of a study of this version"):
        read_study(path)
    assert main(["--render", f"--output={path}"]) == 2
    assert [one.name for one in folder.iterdir()] == ["study.json"]
