"""The stages of a run in order, and where each starts from."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from recbole_dgr2 import views
from recbole_dgr2.config import Config

TEACHER, TEACHER_RL = "ar_teacher", "ar_teacher_rl"
PARENTS: dict[str, tuple[str, ...]] = {
    TEACHER: (),
    "conversion": (TEACHER,),
    "distillation": ("conversion",),
    "reinforcement": ("distillation", "conversion"),
}
"""The stages in run order, and which stages each can start from, the best first."""


def teacher_folder(config: Config, run_dir: Path) -> Path:
    """Where the finished teacher is: after its reinforcement learning, if there is any."""
    return run_dir / (TEACHER_RL if config["ar_teacher_rl_iterations"] else TEACHER)


def start_folder(config: Config) -> Path | None:
    """The folder of an earlier run from which the first of `stages` starts; None where it is the teacher itself.

    Raises:
        ValueError: no earlier run has left it, or a stage follows one that it cannot start from.
    """
    options = views.run_options(config)
    stages = [stage for stage in PARENTS if stage in options.stages]
    for before, stage in pairwise(stages):
        if before not in PARENTS[stage]:
            raise ValueError(
                f"stages {stages}: {stage} starts from {' or '.join(PARENTS[stage])}, not from {before}; add "
                f"{PARENTS[stage][0]} to stages"
            )
    if not stages or not PARENTS[stages[0]]:
        return None
    folders = [options.run_dir / parent for parent in PARENTS[stages[0]]]
    if stages[0] == "conversion":
        folders = [teacher_folder(config, options.run_dir)]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        raise ValueError(
            f"stages {stages}: they start from the {folders[0].name} of an earlier run, and there is no {folders[0]}; "
            f"add {PARENTS[stages[0]][0]} to stages, or set run_dir to the folder of that run"
        )
    teacher = teacher_folder(config, options.run_dir)
    if "distillation" in stages and not teacher.is_dir():
        raise ValueError(f"stages {stages}: distillation learns from the teacher, and there is no {teacher}")
    return found
