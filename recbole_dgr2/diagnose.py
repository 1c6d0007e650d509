"""How far the block-diffusion stages of a finished run are from its teacher; nothing is trained.

python -m recbole_dgr2.diagnose --run_dir=saved/ml-100k-ItemKNN-2020 --users=200

On validation lists. Written into the folder of the run: diagnostics.json, diagnostics.md, and two plots.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbole_dgr2.data.prompt import label
from recbole_dgr2.decode import Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.checkpoint import load_stage, read_info
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.open_run import OpenRun, open_run
from recbole_dgr2.pipeline.preparation import draw_lists, make_lists, tasks_of
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.stage_order import ancestor_teacher, broken_lineage, require_lineage
from recbole_dgr2.report.diagnostics import Commits, MaskedSlots, diagnosis, diagnostics_page
from recbole_dgr2.report.plots import plot_calibration, plot_divergence
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.system.command import Arguments, command, command_parser
from recbole_dgr2.trainer.diagnosis import examine
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import frozen_teacher

STUDENTS = ("conversion", "distillation", "reinforcement")


def diagnose(run: OpenRun, users: int) -> dict[str, Any]:
    """Figures of every student of the run, by stage (see `report.diagnostics`), on lists of at most `users` users.

    Raises:
        ValueError: no student, or no user with a validation list. FileNotFoundError: no teacher.
    """
    finished = [run.folder / stage for stage in STUDENTS if run.finished(stage)]
    stages = [folder.name for folder in finished if not broken_lineage(folder)]
    if finished and not stages:
        require_lineage(finished[0])
    if not stages:
        raise ValueError(
            f"{run.folder}: none of the stages {', '.join(STUDENTS)} is finished; run one of them"
        )
    found = {}
    for stage in stages:
        read_info(ancestor_teacher(run.folder / stage))
    for stage in stages:
        reranker = run.language_model(stage)
        teacher = load_stage(ancestor_teacher(run.folder / stage))[0]
        found[stage] = _of_stage(run, reranker, teacher, _questions(run, reranker, users))
    return found


def _questions(run: OpenRun, reranker: LanguageModelReranker, users: int) -> list[tuple[Request, int]]:
    """Validation lists as prompts, each with its number of candidates."""
    lists = make_lists(run.data, run.source, "valid", run.config["n_candidates"])
    drawn = draw_lists(lists, users, run.config["seed"])
    if not len(drawn):
        raise ValueError(f"{run.folder}: no user has a validation list, so there is nothing to look at")
    tasks = tasks_of(reranker.tasks, lists, drawn)
    counts = [len(task.candidates) for task in tasks]
    return list(zip(reranker.requests(tasks), counts, strict=True))


def _of_stage(
    run: OpenRun,
    reranker: LanguageModelReranker,
    ancestor: Backbone,
    questions: Sequence[tuple[Request, int]],
) -> dict[str, Any]:
    backbone, spec, seed = reranker.backbone, reranker.spec, run.config["seed"]
    assert spec is not None  # of a student
    teacher = frozen_teacher(ancestor, backbone, spec)
    labels = backbone.tokenizer.convert_tokens_to_ids(
        [label(slot) for slot in range(run.config["n_candidates"])]
    )
    # in blocks whatever the run answers with; a roller samples, beside what is asked here
    blocks = replace(views.decode_options(run.config, "block"), temperature=1.0)
    roller = Roller(backbone, spec, blocks)
    found = examine(roller, teacher, questions, labels, seed)
    slots = MaskedSlots(found.kl, found.share, found.answer)
    return diagnosis(slots, Commits(found.confidence, found.agrees), found.labels)


def write_diagnostics(found: dict[str, Any], folder: Path) -> str:
    """Write diagnostics.json, diagnostics.md and the plots into the folder; give the page's text."""
    names = {"divergence": plot_divergence, "calibration": plot_calibration}
    for name, plot in names.items():
        plot(found, folder / f"diagnostics_{name}.png")
    images = "\n".join(f"![{name}](diagnostics_{name}.png)" for name in names)
    text = f"{diagnostics_page(found)}\n{images}\n"
    write_text(folder / "diagnostics.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_text(folder / "diagnostics.md", text)
    return text


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    parser = command_parser("diagnose", __doc__)
    parser.add_argument("--run_dir", required=True, type=Path, help="folder of a finished run")
    parser.add_argument(
        "--users", type=int, default=200, help="validation lists that are answered (default: 200)"
    )
    known = parser.parse_args(arguments)
    if known.users < 1:
        raise ValueError(f"users={known.users}: expected an integer >= 1")
    run = open_run(known.run_dir, show_progress=False)
    sys.stdout.write(write_diagnostics(diagnose(run, known.users), run.folder))


if __name__ == "__main__":
    sys.exit(main())
