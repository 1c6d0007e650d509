"""Stages of several finished runs compared: the tables of a paper over seeds, with intervals and paired tests.

The runs differ in `seed` alone; set `retriever_seed` in all of them, so that every run ranks the same candidates:

  python run_recbole_dgr2.py --dataset=ml-100k --retriever_seed=2020 --seed=2020 --run_dir=saved/s2020
  python run_recbole_dgr2.py --dataset=ml-100k --retriever_seed=2020 --seed=2021 --run_dir=saved/s2021
  python -m recbole_dgr2.study --runs=saved/s2020,saved/s2021 --output=results/stages.json

Each stage of each run (ar_teacher, ar_teacher_rl, conversion, distillation, reinforcement) answers all test hits and
a random sample of users: a teacher autoregressively, a student autoregressively, in blocks at every tau, and
speculatively; `naive`, beside students, is their teacher converted without training. A variant adds a row of its own,
set beside the stage of the same name:

  --variants "RL without OPD=saved/rl-2020:reinforcement,saved/rl-2021:reinforcement"

The JSON is written after every answered stage and decoder, and a second call goes on from it: what was decoded with
the same weights is not decoded again. The page stands beside it as .md, with a plot as .png; `--render` makes both
anew from the JSON alone.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from recbole_dgr2.pipeline.run import hardware, library_versions
from recbole_dgr2.pipeline.study import Plan, Study
from recbole_dgr2.pipeline.study_file import read_study
from recbole_dgr2.pipeline.study_members import variant
from recbole_dgr2.report.study_page import study_page
from recbole_dgr2.report.study_plot import write_plot
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.system.command import Arguments, comma_separated, command, command_parser
from recbole_dgr2.system.threads import use_threads

TAUS = [1.0, 0.9, 0.6, 0.4]


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if options.output.suffix != ".json":
        raise ValueError(f"output={options.output}: expected a file that ends in .json")
    given = sys.argv[1:] if arguments is None else arguments
    if options.render:
        _require_alone(given)
        content = read_study(options.output)
    else:
        use_threads(options.threads)
        about = {
            "command": shlex.join(["python", "-m", "recbole_dgr2.study", *given]),
            "variants": options.variants,
            "threads": torch.get_num_threads(),
            "hardware": hardware(),
            "versions": library_versions(),
        }
        content = Study(_plan(options), options.output, about).run()
    plot = write_plot(content, options.output.with_name(f"{options.output.stem}_validity.png"))
    page = study_page(content, plot.name if plot else None)
    write_text(options.output.with_suffix(".md"), page)
    sys.stdout.write(page)


def _require_alone(given: Sequence[str]) -> None:
    """ValueError where --render stands beside an option that it would not heed."""
    names = [word.partition("=")[0] for word in given if word.startswith("--")]
    others = [name for name in names if name not in ("--render", "--output")]
    if others:
        raise ValueError(f"render: makes the page from the JSON alone, expected --output and no {others[0]}")


def _plan(options: argparse.Namespace) -> Plan:
    if not options.runs:
        raise ValueError("runs: none given, expected folders of finished runs, comma-separated")
    if options.users < 1 or options.timed < 0:
        raise ValueError(f"users={options.users}, timed={options.timed}: expected users >= 1 and timed >= 0")
    for tau in options.taus:
        if not 0 < tau <= 1:
            raise ValueError(f"taus: {tau:g}, expected numbers above 0 and at most 1")
    return Plan(
        runs=tuple(options.runs),
        variants=tuple(map(variant, options.variants)),
        taus=tuple(options.taus),
        users=options.users,
        timed=options.timed,
        data_path=options.data_path,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("study", __doc__)
    add = parser.add_argument
    add(
        "--runs",
        type=comma_separated(Path),
        default=[],
        help="folders of finished runs, one a seed, comma-separated",
    )
    add(
        "--variants",
        action="append",
        default=[],
        metavar="NAME=RUN:STAGE,...",
        help="a further row: the same stage of one run a seed; may be given several times",
    )
    add(
        "--taus",
        type=comma_separated(float),
        default=TAUS,
        help="thresholds (default: 1,0.9,0.6,0.4; 0.9 is always there)",
    )
    add("--users", type=int, default=500, help="random users whose raw answers are judged (default: 500)")
    add("--timed", type=int, default=20, help="hits timed at batch 1; 0: no speed (default: 20)")
    add("--output", type=Path, required=True, help="the JSON; its page is written beside it as .md")
    add("--data_path", help="folder of data sets, where it is no longer where the runs found it")
    add("--threads", type=int, default=0, help="torch threads, 0: measured (default: 0)")
    add("--render", action="store_true", help="only make the page anew from the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
