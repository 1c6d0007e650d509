"""Lint, format and types, run by the same command as the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "lint": ["ruff", "check", "--no-cache", "."],
    "format": ["ruff", "format", "--no-cache", "--check", "."],
    "types": ["mypy"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_source_passes(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[name]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(COMMANDS[name])}\n{done.stdout}{done.stderr}"
