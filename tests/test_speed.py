"""The speed command, end to end on a tiny model, and its parts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recbole_dgr2 import speed
from recbole_dgr2.data.ranking import Ranking
from recbole_dgr2.decode import Request, auto
from recbole_dgr2.decode.outside import generate
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, save_stage
from recbole_dgr2.report.speed import (
    cost_cells,
    curves_of,
    implied_cells,
    points_of,
    quality_entry,
    speed_cells,
)
from recbole_dgr2.work import Work, read_prompts, write_prompts
from tests.decoding import options_of, requests_of, run
from tests.tiny import EOS_ID, MASK_ID, tiny_backbone, tiny_model


def test_prompts_are_read_as_written(tmp_path: Path) -> None:
    work = Work([Request(3, (5, 6)), Request(9, (7,))], [10, None], [2, None])
    write_prompts(tmp_path / "prompts.jsonl", work)
    assert read_prompts(tmp_path / "prompts.jsonl") == work
    (tmp_path / "bare.jsonl").write_text('{"key": 1, "prompt_ids": [4]}\n')
    assert read_prompts(tmp_path / "bare.jsonl") == Work([Request(1, (4,))], [None], [None])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected an object like"),
        ('{"key": 1}', "line 2: .*prompt_ids"),
        ("[1]", "line 2"),
        ('{"key": 1, "prompt_ids": ["a"]}', "line 2"),
    ],
)
def test_a_bad_prompts_file_is_a_one_line_error(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"key": 1, "prompt_ids": [4]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert "\n" not in str(error.value)
    path.write_text("")
    with pytest.raises(ValueError, match="no prompts in it"):
        read_prompts(path)


def test_quality_by_hand() -> None:
    outputs, wanted = [(1, 2, 3), (4, 5)], [(1, 2, 3), (4, 6)]
    rankings = [Ranking((1, 0, 2), True, ()), Ranking((0, 1, 2), False, ("omission",))]
    entry = quality_entry(outputs, wanted, rankings, [1, None], seed=0)
    assert (entry["equal_to_ar"], entry["valid_rate"], entry["hits"]) == (0.5, 0.5, 1)
    assert entry["metrics"]["recall@1"] == 1.0
    assert "valid_rate" not in quality_entry(outputs, wanted, [], [None, None], seed=0)
    assert "metrics" not in quality_entry(outputs, wanted, rankings, [None, None], seed=0)


def test_cells_points_and_curves() -> None:
    base = {
        "tokens_per_second": 10.0,
        "tokens_per_pass": 1.0,
        "seconds": 2.0,
        "passes": 20,
        "prefill_seconds": 0.5,
    }
    slow = {**base, "decoder": "autoregressive", "batch": 4, "speedup": 1.0, "speedup_range": [1.0, 1.0]}
    fast = {**slow, "decoder": "speculative", "speedup": 3.0, "speedup_range": [2.5, 4.0], "equal_to_ar": 1.0}
    rated = {**fast, "metrics": {"recall@1": 0.4}, "ci95": {"recall@1": [0.3, 0.5]}}
    cells = speed_cells([slow, fast], "batch")
    assert cells[2][:5] == ["4", "speculative", "10", "3.00x", "2.50-4.00"]
    assert len({len(row) for row in cells}) == 1
    assert [point.accuracy for point in points_of([slow, rated], "recall@1")] == [0.4]
    (curve,) = curves_of([slow, fast, {**fast, "batch": 1, "speedup": 5.0}], "batch")
    assert (list(curve.x), list(curve.speedup)) == ([1, 4], [5.0, 3.0])
    costs = [{"batch": 1, "queries": (1, 8), "seconds": (0.001, 0.002)}]
    assert cost_cells(costs)[1] == ["1", "1.00", "2.00", "2.00"]
    assert implied_cells([{"input": 32, "speedup": {"autoregressive": 1.0, "b": 2.5}}])[1] == [
        "32",
        "1.00x",
        "2.50x",
    ]


def test_generate_is_the_same_decoder() -> None:
    requests = requests_of([5, 11, 3, 8])
    got = generate(tiny_model(), requests, options_of("autoregressive", 3), EOS_ID, MASK_ID)
    wanted = run(requests, options_of("autoregressive"))
    for a, b in zip(got.completions, wanted.completions, strict=True):
        assert (a.key, a.token_ids, a.finished, a.passes) == (b.key, b.token_ids, b.finished, b.passes)
    assert got.prefill_seconds > 0


def test_command_writes_tables_plots_and_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(auto, "SECONDS", 0.0)
    backbone = tiny_backbone()
    info = StageInfo("conversion", None, BlockDiffusionSpec(8, backbone.model.config.vocab_size - 1))
    save_stage(tmp_path / "stage", backbone, info)
    work = Work(requests_of([9, 12, 9, 10]), [10] * 4, [0, None, 2, 3])
    write_prompts(tmp_path / "prompts.jsonl", work)
    words = [f"--stage={tmp_path / 'stage'}", f"--prompts={tmp_path / 'prompts.jsonl'}"]
    words += [
        f"--output={tmp_path / 'out'}",
        "--requests=3",
        "--rounds=1",
        "--max_new_tokens=12",
        "--threads=1",
    ]
    sweep = ["--taus=0.5,0.9", "--blocks=4,8", "--batches=1,2", "--outputs=4,8", "--inputs=16,32"]
    assert speed.main([*words, *sweep]) == 0
    result = json.loads((tmp_path / "out" / "speed.json").read_text())
    modes = {entry["decoder"]: entry for entry in result["tables"]["modes"]}
    assert set(modes) >= {"autoregressive", "generate", "block 0.5", "block 0.9/4", "speculative 4", "auto"}
    for name in ("generate", "speculative", "speculative 4", "auto"):
        assert modes[name]["equal_to_ar"] == 1.0
    assert modes["autoregressive"]["speedup"] == 1.0
    assert "recall@1" in modes["speculative"]["metrics"]
    assert [one["input"] for one in result["inputs"]] == [16, 32]
    page = (tmp_path / "out" / "speed.md").read_text()
    assert page in capsys.readouterr().out
    assert "## modes" in page and "## pass costs" in page
    for name in ("frontier.png", "speedup_batch.png", "speedup_output.png", "trace.html"):
        assert (tmp_path / "out" / name).stat().st_size > 1000


def test_a_bad_folder_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"key": 1, "prompt_ids": [4]}\n')
    words = [
        f"--stage={tmp_path / 'none'}",
        f"--prompts={tmp_path / 'prompts.jsonl'}",
        f"--output={tmp_path}",
    ]
    assert speed.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
