"""Programs of several processes for tests: `launch` runs a function of a module in N processes, as a launcher would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(rank: int = 0, world: int = 1, port: int = 0) -> dict[str, str]:
    """What `torchrun` tells a process; nothing of it for a world of 1."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    if world > 1:
        found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        found |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return found


def launch(words: list[str], world: int, folder: Path) -> list[tuple[int, str]]:
    """Exit status and output of each process of `python words...`, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env=environment(rank, world, port),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        return [(process.wait(), out) for process in started for out in [process.communicate()[0]]]
    finally:
        for process in started:
            process.kill()


def finished(words: list[str], world: int, folder: Path) -> list[str]:
    """The outputs of processes that must all succeed."""
    found = launch(words, world, folder)
    assert all(status == 0 for status, _ in found), "\n".join(out for _, out in found)
    return [out for _, out in found]
