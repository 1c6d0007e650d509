"""A whole run on the toy data set with a tiny model, shared by the tests that look at one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2 import quick_start
from recbole_dgr2.config import Config
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.pipeline import training
from recbole_dgr2.pipeline.sources import RetrieverSource
from recbole_dgr2.pipeline.training import Setting
from recbole_dgr2.quick_start import run_recbole_dgr2

ROOT = Path(__file__).resolve().parent.parent
Build = Callable[..., Config]
"""What the fixture `toy_config` gives."""
TINY = {
    "data_path": str(ROOT / "dataset"),
    "show_progress": False,
    "use_gpu": False,
    "threads": 1,
    "cache_dir": None,
    "embedded_hidden_size": 32,
    "embedded_num_layers": 1,
    "embedded_intermediate_size": 64,
    "embedded_vocab_size": 400,
    "ar_teacher_epochs": 1,
    "conversion_epochs": 1,
    "distillation_epochs": 1,
    "distillation_prompts": 4,
    "distillation_samples": 2,
    "reinforcement_iterations": 1,
    "reinforcement_groups": 2,
    "reinforcement_group_size": 2,
    "reinforcement_max_draws": 1,
    "max_train_lists": 48,
    "n_candidates": 6,
    "max_new_tokens": 40,
    "validity_sample": 8,
    "speed_requests": 2,
    "bootstrap_samples": 100,
}


@dataclass(frozen=True)
class Finished:
    """A whole run: its folder, its report, and what its stages were made from."""

    folder: Path
    report: dict[str, Any]
    setting: Setting
    backbone: Backbone
    source: RetrieverSource


def run(folder: Path, **keys: Any) -> dict[str, Any]:
    return run_recbole_dgr2(
        dataset="toy", config_dict={**TINY, "checkpoint_dir": str(folder / "saved"), **keys}
    )


def finish(folder: Path) -> Finished:
    """A run in `folder`, with hold of what its stages were made from."""
    made: dict[str, Any] = {}

    def keep(module: object, name: str) -> Callable[..., Any]:
        original = getattr(module, name)

        def call(*values: Any) -> Any:
            made[name] = original(*values)
            return made[name]

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module, name in ((training, "make_setting"), (quick_start, "list_source")):
            patch.setattr(module, name, keep(module, name))
        report = run(folder)
    setting, backbone = made["make_setting"]
    return Finished(setting.run.folder, report, setting, backbone, made["list_source"][0])
