"""What every command line does alike: exit status and one line on stderr."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from recbole_dgr2 import quick_start
from recbole_dgr2.system.command import INTERRUPTED, Arguments, command, ended_as_interrupted
from run_recbole_dgr2 import main as run_main


def body(error: BaseException | None) -> Callable[..., int]:
    @command
    def main(arguments: Arguments = None) -> None:
        if error is not None:
            raise error

    return main


@pytest.mark.parametrize(
    "error,status,line",
    [
        (None, 0, ""),
        (ValueError("tau: 2"), 2, "error: tau: 2\n"),
        (PermissionError("saved: closed"), 2, "error: saved: closed\n"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
    ],
    ids=str,
)
def test_status_and_line(
    error: BaseException | None, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert body(error)([]) == status
    assert capsys.readouterr().err == line


def test_a_fault_of_the_program_is_raised() -> None:
    with pytest.raises(KeyError):
        body(KeyError("x"))([])


def test_a_termination_is_an_interrupt_and_only_while_the_command_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    @command
    def main(arguments: Arguments = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise AssertionError("went on")

    assert main([]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_of_several_processes_is_left_to_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with ended_as_interrupted():
        assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quick_start, "run_recbole_dgr2", interrupted)
    assert run_main(["--dataset=toy"]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted; the same command goes on from what is kept\n"
