"""Ranked lists for users by name, from the folder of a finished run; nothing is trained.

python -m recbole_dgr2.recommend --run_dir=saved/ml-100k-ItemKNN-2020 --users=196,186 --output=lists.csv
python -m recbole_dgr2.recommend --run_dir=saved/ml-100k-ItemKNN-2020 --users=all --decode_mode=auto --output=all.csv
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recbole_dgr2.decode.types import MODES
from recbole_dgr2.pipeline.open_run import History, OpenRun, open_run
from recbole_dgr2.report.export import RankedList, json_lines, write_lists
from recbole_dgr2.system.command import Arguments, command, command_parser


def recommend(
    run_dir: Path | str,
    user_ids: Sequence[Any],
    system: str | None = None,
    history: History = "test",
    **changes: Any,
) -> list[RankedList]:
    """`open_run(run_dir, **changes).recommend(user_ids, system, history)`; changes: e.g. decode_mode."""
    return open_run(run_dir, **changes).recommend(user_ids, system, history)


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    parser = command_parser("recommend", __doc__)
    parser.add_argument("--run_dir", required=True, type=Path, help="folder of a finished run")
    parser.add_argument(
        "--users", required=True, help="ids separated by commas; @FILE: one a line; all: everyone"
    )
    parser.add_argument(
        "--system", help="retriever, conditional_logit or a stage (default: the last stage there is)"
    )
    parser.add_argument(
        "--history", choices=("test", "all"), default="test", help="test: without the test item"
    )
    parser.add_argument(
        "--decode_mode",
        choices=MODES,
        help="how a converted model answers (default: as in the run's options)",
    )
    parser.add_argument("--output", type=Path, help=".csv or .jsonl (default: JSON lines on the terminal)")
    known = parser.parse_args(arguments)
    mode = {} if known.decode_mode is None else {"decode_mode": known.decode_mode}
    run = open_run(known.run_dir, show_progress=False, **mode)
    lists = run.recommend(_users(known.users, run), known.system, known.history)
    missing = sum(entry.status == "missing" for entry in lists)
    if missing:
        sys.stderr.write(f"{missing} of {len(lists)} users have no list; each entry says why\n")
    if known.output is None:
        sys.stdout.write(json_lines(lists))
    else:
        write_lists(lists, known.output)


def _users(text: str, run: OpenRun) -> list[str]:
    if text == "all":
        return run.users()
    if not text.startswith("@"):
        return [user for user in text.split(",") if user]
    path = Path(text[1:])
    if not path.is_file():
        raise FileNotFoundError(f"users: no such file {path}")
    users = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not users:
        raise ValueError(f"users: {path} is empty, expected one user a line")
    return users


if __name__ == "__main__":
    sys.exit(main())
