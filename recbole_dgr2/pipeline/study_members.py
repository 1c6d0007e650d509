"""What a study compares: stages of finished runs that differ in the language model's seed, and variants of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.config import Config, retriever_seed
from recbole_dgr2.model.checkpoint import INFO_FILE, read_info
from recbole_dgr2.pipeline.open_run import STAGES, OpenRun, open_run
from recbole_dgr2.pipeline.preparation import Lists, make_lists
from recbole_dgr2.pipeline.rank_files import lists_digest
from recbole_dgr2.pipeline.run_files import SavedRun, read_run_file
from recbole_dgr2.pipeline.stage_order import TEACHER, TEACHER_RL, ancestor_teacher
from recbole_dgr2.report.acceptance import trace_lines
from recbole_dgr2.report.study_figures import NAIVE, ROWS, STUDENTS

SAME_OPTIONS = ("n_candidates", "mask_history", "topk", "max_new_tokens")
"""Options without which answers cannot be compared; candidates are compared themselves."""
OWN_OPTIONS = (
    *("seed", "retriever_seed", "run_dir", "data_path", "checkpoint_dir", "cache_dir", "show_progress"),
    *("threads", "use_gpu", "gpu_id", "stages", "validity_sample", "speed_requests", "naive_row"),
    "decode_mode",
)
"""Options in which runs that are seeds of one another may differ: places, the machine, what is reported.
The candidates, which retriever_seed decides, are compared themselves."""
CANDIDATE_OPTIONS = (
    "retriever",
    "epochs",
    "learning_rate",
    "train_batch_size",
    "candidate_split",
    "train_last_m",
)


@dataclass(frozen=True)
class Member:
    """One stage of one run, under the name that it has in the tables.

    varies: for a variant, the stage of `--runs` that it is set beside; None for a stage of `--runs` itself.
    teacher: name of the autoregressive stage it grew out of; its own for an autoregressive one.
    """

    name: str
    run: Path
    stage: str
    seed: int
    teacher: str
    varies: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of its weights."""
        return self.run / self.stage


@dataclass(frozen=True)
class Variant:
    """A further row of the tables: one stage folder of one run a seed."""

    name: str
    stages: tuple[tuple[Path, str], ...]


def variant(text: str) -> Variant:
    """`NAME=RUN:STAGE,RUN:STAGE`.

    Raises:
        ValueError: of another form, a stage that there is not, different stages, or the name of another row.
    """
    name, _, rest = (part.strip() for part in text.partition("="))
    parts = [part.rpartition(":") for part in rest.split(",") if part]
    stages = tuple((Path(run), stage) for run, _, stage in parts)
    kinds = {stage for _, stage in stages}
    if not name or len(kinds) != 1 or not kinds <= set(STAGES) or not all(run for run, _, _ in parts):
        raise ValueError(
            f"variants {text!r}: expected NAME=RUN:STAGE,RUN:STAGE with one STAGE of {', '.join(STAGES)}"
        )
    if name in ROWS:
        raise ValueError(f"variants {text!r}: {name} is the name of another row, expected one of its own")
    return Variant(name, stages)


def members_of(runs: Sequence[Path], variants: Sequence[Variant]) -> list[Member]:
    """Every stage that the runs hold, run after run, then the variants; nothing of a language model is loaded.

    Raises:
        FileNotFoundError, ValueError: a folder without a finished run or stage, runs of one seed, a variant of another
            seed than any of the runs, or runs that cannot be compared; one line that names the run and the key.
    """
    saved = {run: read_run_file(run) for run in dict.fromkeys([*runs, *_runs_of(variants)])}
    first = runs[0]
    for run, content in saved.items():
        same = (
            sorted({*saved[first].options, *content.options} - {*OWN_OPTIONS})
            if run in runs
            else SAME_OPTIONS
        )
        _require_alike((first, saved[first]), (run, content), same)
    seeds = {run: int(content.options["seed"]) for run, content in saved.items()}
    of_runs = {seeds[run]: run for run in runs}
    if len(of_runs) < len(runs):
        raise ValueError(
            f"runs: seeds {[seeds[run] for run in runs]}, expected runs that differ in their seed"
        )
    converted = any((run / stage / INFO_FILE).is_file() for run in runs for stage in STUDENTS)
    members = [member for run in runs for member in _stages_of(run, seeds[run], converted)]
    for one in variants:
        for run, stage in one.stages:
            if seeds[run] not in of_runs:
                raise ValueError(
                    f"variant {one.name}: {run} has seed {seeds[run]}, the runs have {list(of_runs)}"
                )
            if not (run / stage / INFO_FILE).is_file():
                raise FileNotFoundError(f"variant {one.name}: {run / stage} is no finished stage")
            teacher = ancestor_teacher(run / stage).name
            members.append(Member(one.name, run, stage, seeds[run], teacher, stage))
        if len({seeds[run] for run, _ in one.stages}) < len(one.stages):
            raise ValueError(
                f"variant {one.name}: two of its runs have the same seed, expected one run a seed"
            )
    return members


def _runs_of(variants: Sequence[Variant]) -> list[Path]:
    return [run for one in variants for run, _ in one.stages]


def _stages_of(run: Path, seed: int, converted: bool) -> list[Member]:
    """The finished stages of a run, and where students are compared `naive`: its teacher, converted untrained."""
    finished = [stage for stage in STAGES if (run / stage / INFO_FILE).is_file()]
    teachers = [stage for stage in (TEACHER, TEACHER_RL) if stage in finished]
    if not finished:
        raise ValueError(f"{run}: no finished stage in it, expected some of {', '.join(STAGES)}")
    members = [Member(stage, run, stage, seed, ancestor_teacher(run / stage).name) for stage in finished]
    grown = [member.teacher for member in members if member.stage not in teachers]
    start = grown[0] if grown else next(reversed(teachers), "")
    if converted and start in teachers:
        members.append(Member(NAIVE, run, start, seed, start))
    return sorted(members, key=lambda member: ROWS.index(member.name))


def _require_alike(first: tuple[Path, SavedRun], other: tuple[Path, SavedRun], same: Sequence[str]) -> None:
    """ValueError where a run has another data set, or another value of an option that is to be the `same`."""
    (at, wanted), (run, found) = first, other
    pairs: dict[str, tuple[Any, Any]] = {"dataset": (wanted.dataset, found.dataset)}
    names = sorted({*wanted.data, *found.data})
    pairs |= {f"data {name}": (wanted.data.get(name), found.data.get(name)) for name in names}
    pairs |= {key: (wanted.options.get(key), found.options.get(key)) for key in same}
    for key, (here, there) in pairs.items():
        if here != there:
            raise ValueError(
                f"{run}: {key} is {there}, but {here} in {at}; expected runs that differ in seed only"
            )


@dataclass(frozen=True)
class RunLists:
    """The test lists of a run, and their digest."""

    lists: Lists
    digest: str

    @property
    def hits(self) -> np.ndarray:
        """int64 [H]: rows whose target is a candidate."""
        return np.flatnonzero(self.lists.slots < self.lists.candidates.n)


def open_tested(run: Path, data_path: str | None) -> tuple[OpenRun, RunLists]:
    """A finished run and its test lists."""
    changes = {"data_path": data_path} if data_path else {}
    opened = open_run(run, show_progress=False, **changes)
    lists = make_lists(opened.data, opened.source, "test", opened.config["n_candidates"])
    return opened, RunLists(lists, lists_digest(lists.candidates.ids, lists.targets))


def require_same_lists(first: tuple[Config, RunLists], other: tuple[Config, RunLists], run: Path) -> None:
    """ValueError where the test candidates of a run are not those of the first; it names the key that tells why."""
    if first[1].digest == other[1].digest:
        return
    seeds = tuple(retriever_seed(config) for config, _ in (first, other))
    pairs = {"retriever_seed": seeds} | {key: (first[0][key], other[0][key]) for key in CANDIDATE_OPTIONS}
    for key, (here, there) in pairs.items():
        if here != there:
            reason = f"{key} is {there}, expected {here}"
            break
    else:
        reason = "the options shown agree, so another option of the retriever or its checkpoint differs"
    raise ValueError(f"{run}: other test candidates than those of the first run; {reason}")


def training_seconds(run: Path, stage: str) -> float | None:
    """Seconds that a stage's training took, from the run's log: of the last time that it was not just reused.

    None where the log does not say. A training that was interrupted counts from where it was taken up again.
    """
    log = run / "run.log"
    if not log.is_file():
        return None
    seconds, reused = None, False
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        _, _, text = line.partition(" INFO ")
        if text.startswith(f"{stage}: started"):
            reused = False
        elif text.startswith(f"stage {stage}: ") and text.endswith("reused"):
            reused = True
        elif (found := re.fullmatch(rf"{stage}: ([\d.]+) s", text)) and not reused:
            seconds = float(found[1])
    return seconds


def training_traces(member: Member) -> str | None:
    """How the traces that a teacher was fine-tuned on came about; None for the reasoner's own of every list, and for
    other stages."""
    entries = read_info(member.folder).data.get("traces") if member.stage == TEACHER else None
    return trace_lines(entries) if entries else None


def describe(member: Member) -> str:
    """The member in a word, for a log."""
    return f"seed {member.seed}, {member.name}"


def is_student(member: Member) -> bool:
    """Whether a member's folder holds a converted model; `naive` counts as one."""
    return member.name == NAIVE or read_info(member.folder).block_diffusion is not None
