"""The scaling benchmark: exponents by hand, a small run, and blocks of scores that stay small."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from recbole_dgr2 import scale
from recbole_dgr2.data.candidates import SCORE_CELLS, HeadOptions, build_candidates
from recbole_dgr2.data.sequences import leave_one_out_rows


def test_exponents_by_hand() -> None:
    assert scale.growth_exponent([10, 100, 1000], [2.0, 20.0, 200.0]) == pytest.approx(1.0)
    assert scale.growth_exponent([10, 100, 1000], [1.0, 100.0, 10000.0]) == pytest.approx(2.0)
    assert math.isnan(scale.growth_exponent([10], [1.0]))


def test_no_block_of_scores_grows_with_users_or_items() -> None:
    seen: list[int] = []

    def score(users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        seen.append(len(users) * n_items)
        return torch.rand(len(users), n_items)

    options = HeadOptions(10, 10, True)
    for n_users, n_items in ((700, 50), (9, 4_000_001), (30, 500_001)):
        seen.clear()
        assert options.rows_at_once(n_items) * n_items <= max(SCORE_CELLS, n_items)
        if n_items < 1_000_000:
            sequences = scale.synthetic_sequences(n_users, n_items - 1)
            found = build_candidates(score, leave_one_out_rows(sequences, "test"), sequences, options)
            assert len(found) == n_users
            assert max(seen) <= SCORE_CELLS


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--users=200,400", "--items=300,600", f"--output={tmp_path / 'scale.json'}"]) == 0
    content = json.loads((tmp_path / "scale.json").read_text())
    text = (tmp_path / "scale.md").read_text()
    assert text == scale.page(content)
    assert capsys.readouterr().out in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + 3
    assert "growth exponent in users: time" in text
    assert "growth exponent in items: time" in text
