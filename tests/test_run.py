"""What surrounds a run: its folder, its log, and the time of its phases."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch

from recbole_dgr2 import compat
from recbole_dgr2.model.backbone import hide_progress_bars
from recbole_dgr2.pipeline.run import Run, library_versions


def test_phases_add_up_and_set_the_threads(tmp_path: Path) -> None:
    with Run(tmp_path / "run", 1, 1) as run:
        with run.phase("a"):
            first = torch.rand(3)
        once = run.seconds["a"]
        with run.phase("b"):
            pass
        with run.phase("a"):
            pass
    assert list(run.seconds) == ["a", "b"]
    assert run.seconds["a"] > once
    with Run(tmp_path / "run", 1, 1):
        assert torch.equal(torch.rand(3), first)


def test_the_log_has_no_colours_and_ends_with_the_run(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    with Run(tmp_path, 1, 1) as run, run.phase("work"):
        logging.getLogger().info("\x1b[1;32mepoch 0\x1b[0m of %s", "1")
    logging.getLogger().error("afterwards")
    text = (tmp_path / "run.log").read_text()
    assert "INFO epoch 0 of 1\n" in text
    assert "work: started, 1 thread\n" in text
    assert "afterwards" not in text
    assert (list(root.handlers), root.level) == (before, level)


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError])
def test_bad_input_takes_a_new_folder_with_it(tmp_path: Path, error: type[Exception]) -> None:
    def fail(folder: Path, keep: bool, kind: type[Exception] = error) -> None:
        with pytest.raises(kind), Run(folder, 1, 1) as run:
            (folder / "file").touch()
            if keep:
                run.keep()
            raise kind("bad")

    fail(tmp_path / "a" / "b", keep=False)
    assert list(tmp_path.iterdir()) == []
    fail(tmp_path / "a" / "b", keep=True)
    assert (tmp_path / "a" / "b" / "file").exists()
    fail(tmp_path / "a" / "b", keep=False)  # it was there before
    fail(tmp_path / "a" / "c", keep=False)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]
    fail(tmp_path / "d", keep=False, kind=RuntimeError)  # no bad input: what there is may help to see why
    assert (tmp_path / "d" / "run.log").exists()


def test_versions() -> None:
    found = library_versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "platform", "recbole", "transformers"} <= set(found)


def test_only_recboles_own_warnings_are_hushed() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compat._hush_recbole()
        for module in (
            "recbole.data.dataset.dataset",
            "recbole_dgr2.pipeline.run",
            "recbole_other",
            "pandas",
        ):
            for category in (FutureWarning, DeprecationWarning, UserWarning):
                warnings.warn_explicit("text", category, "file.py", 1, module=module, registry={})
    assert [warning.category for warning in seen] == [
        UserWarning, *[FutureWarning, DeprecationWarning, UserWarning] * 3,
    ]  # fmt: skip


def test_bars_of_downloads_stay() -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    hide_progress_bars()
    assert not transformers_logging.is_progress_bar_enabled()
    assert not are_progress_bars_disabled()
