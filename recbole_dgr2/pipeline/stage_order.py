"""The stages of a run in order, and where each starts from."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

from recbole_dgr2.config import Config
from recbole_dgr2.pipeline import stage_views, views
from recbole_dgr2.system import processes

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


def ancestor_teacher(folder: Path) -> Path:
    """The folder of the autoregressive stage that a finished stage grew out of, by what the checkpoints record; of the
    first on the way that is not there any more, where one is not.

    Raises:
        ValueError: a `dgr2.json` that cannot be read.
    """
    from recbole_dgr2.model.checkpoint import read_info

    while folder.is_dir():
        info = read_info(folder)
        if info.block_diffusion is None or info.parent is None:
            break
        folder = folder.parent / info.parent
    return folder


def broken_lineage(folder: Path) -> str | None:
    """Why a finished stage does not belong to the others beside it; None where every parent that is there holds the
    weights that its child was made from.

    Raises:
        ValueError: a `dgr2.json` that cannot be read.
    """
    from recbole_dgr2.model.adapters import weights_digest
    from recbole_dgr2.model.checkpoint import read_info

    info = read_info(folder)
    parent = None if info.parent is None else folder.parent / info.parent
    if parent is None or not parent.is_dir():
        return None
    if info.parent_weights != weights_digest(parent):
        return (
            f"{folder} was made from other weights than {parent} holds now; run stage {folder.name} again, or put the "
            f"{parent.name} that it was made from back"
        )
    return broken_lineage(parent)


def require_lineage(folder: Path) -> None:
    """ValueError where a finished stage does not belong to those beside it; see `broken_lineage`."""
    reason = broken_lineage(folder)
    if reason is not None:
        raise ValueError(reason)


def unchanged_stages(run_dir: Path, names: Iterable[str]) -> list[dict[str, str]]:
    """Of the finished stages among `names`, those that ended with the weights of their parent: {stage, parent}.

    Raises:
        ValueError: a `dgr2.json` that cannot be read.
    """
    from recbole_dgr2.model.adapters import weights_digest
    from recbole_dgr2.model.checkpoint import read_info

    found = []
    for folder in (run_dir / name for name in names):
        info = read_info(folder) if folder.is_dir() else None
        if info and info.parent and info.parent_weights == weights_digest(folder):
            found.append({"stage": folder.name, "parent": info.parent})
    return found


def require_shardable(config: Config) -> None:
    """ValueError, before anything is prepared, where a stage asks for an optimizer that sharded weights rule out."""
    if not processes.sharded():
        return
    trained = [*views.run_options(config).stages]
    if TEACHER in trained:
        trained += [TEACHER_RL] * bool(config["ar_teacher_rl_iterations"])
        trained += ["mid_training"] * bool(config["mid_training_epochs"])
    for stage in trained:
        key = f"{stage}_optimizer"
        if config[key] != "adamw":
            raise ValueError(f"{key}: {config[key]} needs whole matrices, which FSDP shards; expected adamw")


def option_prefixes_without(stages: Collection[str]) -> tuple[str, ...]:
    """What the names of options begin with that are of none of `stages`: a run that was not asked for a stage says
    nothing of how it was trained."""
    return tuple(f"{stage}_" for stage in PARENTS if stage not in stages)


def start_folder(config: Config) -> Path | None:
    """The folder of an earlier run from which the first of `stages` starts; None where it is the teacher itself.

    Raises:
        ValueError: no earlier run has left it, it was made from other weights than its own parent's are now, or a
            stage follows one that it cannot start from.
    """
    options = views.run_options(config)
    if "distillation" in options.stages:
        stage_views.distillation_teacher(config)
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
        names, earlier = " or ".join(folder.name for folder in folders), [*PARENTS]
        raise ValueError(
            f"stages {stages}: they start from the {names} of an earlier run, and there is no {folders[0]}; add "
            f"{', '.join(earlier[: earlier.index(stages[0])])} to stages, or set run_dir to the folder of that run"
        )
    require_lineage(found)
    if stages[0] == "distillation" and stage_views.distillation_teacher(config) == TEACHER:
        teacher = ancestor_teacher(found)
        if not teacher.is_dir():
            raise ValueError(
                f"stages {stages}: distillation learns from the teacher, and there is no {teacher}"
            )
    return found
