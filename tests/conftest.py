"""Shared by all tests: one torch thread, and runs that write nowhere but a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

import recbole_dgr2  # noqa: F401 mends RecBole's dependencies before a test imports recbole
from recbole_dgr2.config import Config

if TYPE_CHECKING:
    from tests.toy_run import Finished

ROOT = Path(__file__).resolve().parent.parent

# Two threads on a busy machine ran 20 to 40 times slower than one.
torch.set_num_threads(1)

# The same examples in every run, and no limit of time: a busy machine is no fault.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One whole run on the toy data set; copy its folder before changing it."""
    from tests.toy_run import finish

    return finish(tmp_path_factory.mktemp("run"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toy_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A function that builds the Config of a tiny run on the toy data set; keyword arguments are its keys.

    The test runs in `tmp_path`, since RecBole writes log/ and log_tensorboard/ into the current folder.
    """
    monkeypatch.chdir(tmp_path)

    def build(**keys: Any) -> Config:
        tiny = {
            "data_path": str(ROOT / "dataset"),
            "checkpoint_dir": str(tmp_path / "saved"),
            "show_progress": False,
            "state": "ERROR",
            "use_gpu": False,
            "threads": 1,
            "epochs": 1,
            "embedded_hidden_size": 32,
            "embedded_num_layers": 1,
            "embedded_intermediate_size": 64,
            "embedded_vocab_size": 400,
        }
        return Config(dataset="toy", config_dict={**tiny, **keys})

    return build
