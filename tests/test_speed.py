"""The speed command, end to end on a tiny model, and its parts by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recbole_dgr2 import speed
from recbole_dgr2.data.ranking import Ranking
from recbole_dgr2.decode import auto, costs
from recbole_dgr2.decode.outside import generate
from recbole_dgr2.pipeline.bench import Contender, contender
from recbole_dgr2.pipeline.open_run import open_run
from recbole_dgr2.pipeline.work import Lists, Work
from recbole_dgr2.report.speed import (
    auto_cells,
    cost_cells,
    curves_of,
    implied_cells,
    losses,
    points_of,
    quality_entry,
    speed_cells,
)
from tests.decoding import options_of, requests_of, run
from tests.tiny import EOS_ID, MASK_ID, tiny_model
from tests.toy_run import Finished


def test_quality_by_hand() -> None:
    outputs, wanted = [(1, 2, 3), (4, 5)], [(1, 2, 3), (4, 6)]
    own = [Ranking((1, 0, 2), True, ()), Ranking((0, 1, 2), False, ("omission",))]
    base = [Ranking((0, 1, 2), True, ()), Ranking((0, 1, 2), True, ())]
    entry = quality_entry(outputs, wanted, (own, base), [1, None], seed=0)
    assert (entry["equal_to_ar"], entry["valid_rate"], entry["hits"]) == (0.5, 0.5, 1)
    assert entry["failures"]["omission"] == 1
    assert entry["metrics"]["recall@1"] == 1.0
    assert entry["difference"]["recall@1"]["mean"] == 1.0
    assert "metrics" not in quality_entry(outputs, wanted, (own, base), [None, None], seed=0)


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("autoregressive", "autoregressive", {}),
        ("block 0.9", "block", {"tau": 0.9}),
        ("block 0.9/16", "block", {"tau": 0.9, "block_size": 16}),
        ("block factor=1", "block", {"rule": "factor", "rule_value": 1.0}),
        ("speculative 16", "speculative", {"block_size": 16}),
        ("synchronised 0.9", "synchronised", {"tau": 0.9}),
        ("auto", "auto", {}),
        ("auto any", "auto", {"exact": False}),
    ],
)
def test_a_name_says_how_to_decode(name: str, mode: str, options: dict[str, object]) -> None:
    assert contender(name) == Contender(name, mode, options)


@pytest.mark.parametrize("name", ["block x", "speculative 0.5", "block 0.9/x", "block factor=x"])
def test_a_name_that_says_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"decoder '{name}': expected e.g. 'block 0.9'"):
        contender(name)


def test_where_it_does_not_pay() -> None:
    slow = {"decoder": "speculative", "batch": 64, "speedup": 0.5}
    entries = [slow, {**slow, "speedup": 1.5}, {**slow, "decoder": "generate"}]
    assert losses(entries, "batch") == ["- speculative at batch 64: 0.50x"]


def test_auto_stands_beside_the_best_it_may_take() -> None:
    def entry(decoder: str, speedup: float, batch: int = 4, reason: str = "") -> dict[str, object]:
        return {
            "decoder": decoder,
            "batch": batch,
            "speedup": speedup,
            "reason": reason,
            "tokens_per_second": 100.0 * speedup,
            "rates": [90.0 * speedup, 100.0 * speedup, 300.0 * speedup + (10 if reason else 0)],
            "first_call": 150.0 if reason else None,
            "queries": {"32": 9} if decoder == "block 0.9" else {},
        }

    fixed = [
        entry("autoregressive", 1.0),
        entry("speculative 16", 2.0),
        entry("speculative", 1.5),
        entry("block 0.9", 2.0),
        entry("block 0.9/16", 2.5),
        entry("block 0.4", 9.0),  # of another threshold
        entry("synchronised 0.9", 9.0),  # nothing that auto may take
    ]
    autos = [
        entry("auto", 1.9, reason="speculative 16; ms"),
        entry("auto any", 3.0, reason="block 0.9/16; ms"),
    ]
    longest = [entry("speculative", 2.0, 8), entry("block 0.9", 1.0, 8), entry("autoregressive", 1.9, 8)]
    alike = [entry("auto", 1.0, 8, "speculative 32; ms"), entry("auto any", 1.5, 8, "block 0.9/32; ms")]
    other = [
        entry("autoregressive", 1.0, 1),
        entry("auto", 1.0, 1, "autoregressive: context 'block' has no exact drafts"),
    ]
    assert auto_cells([*fixed, *autos, *other, *longest, *alike])[1:] == [
        ["4", "exact", "speculative 16", "speculative 16", "the best", "-5.0%", "-5% to -3%", "-21%"],
        ["4", "any", "block 0.9/16", "block 0.9/16", "the best", "+20.0%", "+20% to +21%", "-50%"],
        ["1", "exact", "autoregressive", "autoregressive", "the best", "+0.0%", "+0% to +3%", "+50%"],
        ["8", "exact", "speculative", "speculative 32", "the best", "-50.0%", "-50% to -48%", "+50%"],
        ["8", "any", "speculative", "block 0.9/32", "-50.0%", "-25.0%", "-25% to -23%", "+0%"],
    ]
    assert len(auto_cells(fixed)) == 1


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
    assert [point.accuracy for point in points_of([slow, fast], [rated], "recall@1")] == [0.4]
    assert points_of([slow], [rated], "recall@1") == []
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SECONDS", 0.0)
    monkeypatch.setattr(auto, "SETTLE", 2)


SWEEP = [
    *("--requests=3", "--rounds=1", "--users=5", "--threads=1", "--taus=0.5,0.9", "--rules=block factor=1"),
    *("--blocks=4,8", "--batches=1,2", "--outputs=4,8", "--inputs=16,32"),
]


@pytest.mark.usefixtures("quick")
def test_command_writes_tables_plots_and_traces(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--run_dir={finished.folder}", f"--output={tmp_path / 'out'}"]
    assert speed.main([*words, *SWEEP]) == 0
    result = json.loads((tmp_path / "out" / "speed.json").read_text())
    modes = {entry["decoder"]: entry for entry in result["tables"]["modes"]}
    assert set(modes) >= {
        "autoregressive",
        "generate",
        "block 0.5",
        "block factor=1",
        "speculative 4",
        "auto",
        "auto any",
    }
    for name in ("generate", "speculative", "speculative 4", "auto"):
        assert modes[name]["equal_to_ar"] == 1.0
    assert modes["autoregressive"]["speedup"] == 1.0
    assert "recall@1" in modes["speculative"]["metrics"]
    assert modes["auto"]["first_call"] > 0 and modes["block 0.5"]["first_call"] is None
    for batch in (1, 2):  # everything that auto may take is there to compare with
        names = {entry["decoder"] for entry in result["tables"]["batch"] if entry["batch"] == batch}
        assert names >= {"block 0.9", "block 0.9/4", "speculative", "speculative 4", "auto", "auto any"}
    quality = {entry["decoder"]: entry for entry in result["quality"]}
    assert quality["speculative"]["equal_to_ar"] == 1.0 and quality["speculative"]["users"] == 5
    assert quality["speculative"]["difference"]["recall@1"]["mean"] == 0.0
    assert [one["input"] for one in result["inputs"]] == [16, 32]
    page = (tmp_path / "out" / "speed.md").read_text()
    assert page in capsys.readouterr().out
    assert (
        "## Batch 1" in page
        and "## Cost of a pass" in page
        and "against best" in page
        and result["command"] in page
    )
    for name in ("speed_frontier.png", "speed_batch.png", "speed_output.png", "speed_trace.html"):
        assert (tmp_path / "out" / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("folder", "stage", "message"),
    [("none", "conversion", "no run.json"), ("run", "ar_teacher", "is autoregressive"), ("run", "x", "x")],
)
def test_a_bad_run_or_stage_is_a_one_line_error(
    finished: Finished,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folder: str,
    stage: str,
    message: str,
) -> None:
    path = finished.folder if folder == "run" else tmp_path / folder
    assert speed.main([f"--run_dir={path}", f"--stage={stage}", f"--output={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


def test_an_output_longer_than_the_runs_answers_is_refused(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--run_dir={finished.folder}", f"--output={tmp_path / 'out'}", "--outputs=4,999"]
    assert speed.main(words) == 2
    assert capsys.readouterr().err == "error: --outputs 999: expected 2 to 40, the run's max_new_tokens\n"


@pytest.mark.usefixtures("quick")
def test_without_hits_or_a_causal_stream(finished: Finished) -> None:
    """No accuracy where there is no hit, no drafts where nothing can verify them; the rest is measured."""
    opened = open_run(finished.folder)
    options = speed._parser().parse_args(["--run_dir=x", "--output=x", *SWEEP])
    bench, lists = speed._bench(opened, options)
    none = Work(requests=[], candidates=[], targets=[])
    blind = replace(bench, spec=replace(bench.spec, context="block"))
    result = speed.run(blind, Lists(lists.users, none), options)
    names = {entry["decoder"] for entries in result["tables"].values() for entry in entries}
    assert "block 0.9" in names and not [name for name in names if name.startswith("speculative")]
    assert all(entry["hits"] == 0 and "metrics" not in entry for entry in result["quality"])
