"""What a study reads of its runs without decoding: variants, seconds of training, where traces came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recbole_dgr2.pipeline.study_members import training_seconds, training_traces, variant


@pytest.mark.parametrize(
    "text", ["x", "x=saved/a", "x=saved/a:none", "=a:conversion", "x=a:conversion,b:ar_teacher"]
)
def test_a_variant_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=RUN:STAGE"):
        variant(text)
    with pytest.raises(ValueError, match="conversion is the name of another row"):
        variant("conversion=a:conversion")


def test_seconds_are_those_of_the_last_training(tmp_path: Path) -> None:
    assert training_seconds(tmp_path, "conversion") is None
    lines = ["conversion: started, 1 thread", "conversion: 12.5 s", "conversion: started, 1 thread"]
    lines += ["stage conversion: x is finished and up to date, reused", "conversion: 0.1 s"]
    (tmp_path / "run.log").write_text("".join(f"12:00:00 INFO {line}\n" for line in lines))
    assert training_seconds(tmp_path, "conversion") == 12.5
    assert training_seconds(tmp_path, "distillation") is None


def test_traces_are_told_where_they_are_not_the_reasoners_own(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert training_traces(tmp_path) is None
    report.write_text("{}")
    assert training_traces(tmp_path) is None
    counts = {"lists": 8, "accepted": 5, "attempts": 20, "prompt_tokens": 0, "completion_tokens": 0}
    entry = {"phase": "training", "source": "evidence", "model": "reasoner", "mode": "rejection", **counts}
    report.write_text(json.dumps({"traces": [entry]}))
    found = training_traces(tmp_path)
    assert (
        found is not None
        and "training 5 of 8 lists in 20 attempts of reasoner (evidence, rejection)" in found
    )
