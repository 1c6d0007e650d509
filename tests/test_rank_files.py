"""Ranks of a run's hits outlive the go that found them, as long as the same model would answer in the same way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.pipeline.rank_files import RANKS_FILE, compare_rows, read_ranks
from recbole_dgr2.report.tables import Row
from tests.toy_run import Build, Finished


def test_ranks_are_kept_beside_the_report(finished: Finished) -> None:
    saved = read_ranks(finished.folder)
    assert next(iter(saved.ranks)) == "retriever" and set(saved.made_by) >= {"ar_teacher", "conversion"}
    for row in finished.report["rows"]:
        ranks = np.array(saved.ranks[row["name"]])
        assert np.mean(ranks == 0) == pytest.approx(row["hits"]["recall@1"])


def test_stages_of_an_earlier_go_are_compared_with(finished: Finished, tmp_path: Path) -> None:
    """A run may train one stage a go: the teacher's ranks stay as long as its weights do."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    config, panel = finished.setting.config, finished.setting.panel
    kept = read_ranks(folder).ranks
    rows = [Row(name, ranks=kept[name]) for name in ("retriever", "conversion")]
    pairs = {(entry["a"], entry["b"]) for entry in compare_rows(config, rows, panel, folder)}
    assert {("conversion", "ar_teacher"), ("ar_teacher", "retriever")} <= pairs
    with (folder / "ar_teacher" / "model.safetensors").open("ab") as file:
        file.write(b"other")
    pairs = {(entry["a"], entry["b"]) for entry in compare_rows(config, rows, panel, folder)}
    assert "ar_teacher" not in {name for pair in pairs for name in pair}
    assert "ar_teacher" not in read_ranks(folder).ranks
    (folder / RANKS_FILE).write_text("{")
    assert compare_rows(config, rows, panel, folder)  # said in a warning, and written anew
    assert set(read_ranks(folder).ranks) == {"retriever", "conversion"}


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [("decode_mode", "speculative", False), ("tau", 0.5, False), ("decode_batch_size", 2, True)],
)
def test_ranks_of_an_earlier_go_count_where_it_decoded_alike(
    finished: Finished, tmp_path: Path, toy_config: Build, key: str, value: Any, kept: bool
) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    config, panel = finished.setting.config, finished.setting.panel
    rows = [Row(name, ranks=read_ranks(tmp_path / "run").ranks[name]) for name in ("retriever", "ar_teacher")]
    changed = toy_config(**{**config.given, key: value})
    compare_rows(changed, rows, panel, tmp_path / "run")
    assert ("conversion" in read_ranks(tmp_path / "run").ranks) == kept
