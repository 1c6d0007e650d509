"""Several processes on CPUs over gloo: the same numbers as one, nothing lost, nothing twice, one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.system import processes
from recbole_dgr2.system.paths import properties_dir
from tests.launched import finished, launch
from tests.toy_run import TINY


def run(what: str, world: int, folder: Path, lives: int = 0) -> list[Any]:
    folder.mkdir(exist_ok=True)
    outs = finished(["-m", "tests.process_program", str(folder), what, str(lives)], world, folder)
    return [json.loads(out.strip().splitlines()[-1]) for out in outs]


def test_one_process_does_its_work_and_nothing_else() -> None:
    assert processes.world() == 1 and processes.is_main() and not processes.label()
    assert processes.gather(3) == [3]
    assert processes.from_main(lambda: "x") == "x"
    assert processes.spread([1, 2, 3], lambda part: [-item for item in part]) == [-1, -2, -3]
    processes.require_same({"a": object()}, "nowhere")
    with processes.main_first():
        processes.wait()


def test_a_launcher_that_started_one_process_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    processes.start()
    assert "properties/accelerate/cpus_2.yaml" in caplog.text


def test_a_machine_of_fewer_cores_than_processes_gives_each_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [processes.local_share(cores) for cores in (2, 4, 9)] == [1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_exchanges(world: int, tmp_path: Path) -> None:
    found = run("exchanges", world, tmp_path)
    for rank, each in enumerate(found):
        assert each["spread"] == [[2 * item for item in range(count)] for count in range(6)]
        assert each["seen"] == [item for count in range(6) for item in range(rank, count, world)]
        assert each["main"] == "of process 0"
        assert each["failed"] == ("KeyError" if rank == 0 else "Stopped")
    assert f"here: rank not the same in all {world} processes" in found[0]["same"]
    assert found[1]["same"] == "the processes differ"  # says no more: the main process says it


def close(one: Any, other: Any) -> None:
    assert len(one["history"]) == len(other["history"])
    for left, right in zip(one["history"], other["history"], strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-4)
    assert one["weights"] == pytest.approx(other["weights"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "death"), [("supervised", 6), ("on_policy", 2)])
def test_two_processes_train_as_one_and_resume(what: str, death: int, tmp_path: Path) -> None:
    """The last batch is odd, so that one process has an example less."""
    alone = run(what, 1, tmp_path / "one")[0]
    both = run(what, 2, tmp_path / "two")
    assert both[0] == both[1]
    close(both[0], alone)
    killed = run(what, 2, tmp_path / "killed", death)
    assert "killed" in killed and not (tmp_path / "killed" / what).exists()
    close(run(what, 2, tmp_path / "killed")[0], alone)


@pytest.mark.slow
def test_an_error_is_told_once(tmp_path: Path) -> None:
    """Both processes find it; the main one says it."""
    found = launch(["-m", "run_recbole_dgr2", "--dataset=toy", "--tua=0.5"], 2, tmp_path)
    assert [status for status, _ in found] == [2, 2]
    lines = [line for _, out in found for line in out.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "the nearest known key is 'tau'" in lines[0]
    assert "Traceback" not in found[0][1] + found[1][1]


@pytest.mark.slow
def test_the_ready_launch_starts_two_processes(tmp_path: Path) -> None:
    launcher = ["-m", "accelerate.commands.launch", "--config_file"]
    ready = str(properties_dir() / "accelerate" / "cpus_2.yaml")
    out = finished(
        [*launcher, ready, "-m", "tests.process_program", str(tmp_path), "exchanges"], 1, tmp_path
    )[0]
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert sorted(each["failed"] for each in found) == ["KeyError", "Stopped"]


@pytest.mark.slow
def test_a_run_of_two_processes_reports_what_one_does(tmp_path: Path) -> None:
    """Candidates, metrics, validity and reasoning; the log and the table come from the main process."""
    keys = {**TINY, "cache_dir": "auto", "stages": "[ar_teacher]", "n_drills": 0}
    keys |= {"ar_teacher_optimizer": "adamw", "ar_teacher_learning_rate": 1e-3}
    reports, logs = [], []
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        words = [f"--{key}={value}" for key, value in (keys | {"checkpoint_dir": folder / "saved"}).items()]
        outs = finished(["-m", "run_recbole_dgr2", "--dataset=toy", *words], world, folder)
        logs.append(outs[-1])
        reports.append(json.loads((folder / "saved" / "toy-ItemKNN-2020" / "report.json").read_text()))
    one, two = reports
    for report in reports:
        for row in report["rows"]:
            row.pop("decode")
    assert {**one, "phases": None} == {**two, "phases": None}
    assert "recall@1" in logs[0] and "INFO" not in logs[1] and "recall@1" not in logs[1]
