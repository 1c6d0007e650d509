"""How candidate generation grows with users and items: time and peak memory over synthetic catalogues.

python -m recbole_dgr2.scale --users=10000,100000,1000000 --items=10000,100000,1000000

Users grow at the fewest items and items at the fewest users, each point in a process of its own, so that its peak
memory is its own. Times are those of the processor, on one thread, so that other work on the machine does not count.
The scores come from a stand-in for a retriever, whose time is measured apart and taken off: what is left is the
masking, the top-N, and what is kept. The growth exponent b is fitted to time = a * size^b; 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from recbole_dgr2.data.candidates import HeadOptions, build_candidates
from recbole_dgr2.data.sequences import Sequences, leave_one_out_rows
from recbole_dgr2.pipeline.run import hardware, library_versions
from recbole_dgr2.report.benchmark_page import markdown
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.system.command import Arguments, command, command_parser

LENGTH = 8
"""Interactions a user."""
HEAD = HeadOptions(n_candidates=10, kmax=10, mask_history=True)
WARM_UP = 2000
"""Users of a first pass that is not measured."""
EXPLAINED = (
    "Synthetic catalogues; processor time on one thread; the retriever's own scoring is measured apart and not counted "
    "in seconds. KiB/user: peak memory beyond that of the empty process."
)


@dataclass(frozen=True)
class Point:
    """One synthetic catalogue: CPU seconds of candidate generation beyond scoring, of scoring, and peak memory in MiB.

    `start_mib` is the memory of the process before the catalogue was made.
    """

    users: int
    items: int
    seconds: float
    scoring_seconds: float
    start_mib: float
    peak_mib: float

    @property
    def microseconds(self) -> float:
        """Microseconds a user."""
        return 1e6 * self.seconds / self.users

    @property
    def kib(self) -> float:
        """KiB a user beyond the memory of the empty process."""
        return 1024 * (self.peak_mib - self.start_mib) / self.users


def synthetic_sequences(users: int, items: int, seed: int = 0) -> Sequences:
    """LENGTH interactions of each user with items of Zipf-like popularity."""
    rng = np.random.default_rng(seed)
    drawn = (items * rng.random(users * LENGTH) ** 3).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.arange(users + 1, dtype=np.int64) * LENGTH])
    return Sequences(users + 1, items + 1, offsets, drawn)


class TimedScores:
    """Stands in for a retriever: one random vector of scores, shifted from user to user; `seconds` is its time."""

    def __init__(self, items: int, seed: int = 0) -> None:
        self._scores = torch.rand(2 * (items + 1), generator=torch.Generator().manual_seed(seed))
        self._items = items
        self.seconds = 0.0

    def __call__(self, users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        """Scores [B, n_items]."""
        start = time.process_time()
        shifts = (users * 7919) % (self._items + 1)
        rows = torch.stack([self._scores[shift : shift + self._items + 1] for shift in shifts.tolist()])
        self.seconds += time.process_time() - start
        return rows


def measure_point(users: int, items: int) -> Point:
    """Measure one catalogue in this process."""
    torch.set_num_threads(1)
    start_mib = _peak_mib()
    sequences, scores = synthetic_sequences(users, items), TimedScores(items)
    rows = leave_one_out_rows(sequences, "test")
    build_candidates(scores, rows.take(slice(0, WARM_UP)), sequences, HEAD)
    scores.seconds = 0.0
    start = time.process_time()
    build_candidates(scores, rows, sequences, HEAD)
    total = time.process_time() - start
    return Point(users, items, total - scores.seconds, scores.seconds, start_mib, _peak_mib())


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_apart(users: int, items: int) -> Point:
    """Measure one catalogue in a process of its own."""
    words = [sys.executable, "-m", "recbole_dgr2.scale", f"--users={users}", f"--items={items}", "--point"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return Point(**json.loads(done.stdout))


def growth_exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Slope of log(value) over log(size) by least squares; NaN for fewer than two sizes."""
    if len(set(sizes)) < 2:
        return float("nan")
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def table(by_users: Sequence[Point], by_items: Sequence[Point]) -> list[str]:
    """The points as a Markdown table, and the growth exponents of time and memory."""
    head = ("users", "items", "seconds", "scoring s", "us/user", "peak MiB", "KiB/user")
    cells = [list(head)]
    for point in dict.fromkeys([*by_users, *by_items]):
        times = (f"{point.seconds:.2f}", f"{point.scoring_seconds:.2f}", f"{point.microseconds:.1f}")
        cells.append(
            [f"{point.users:,}", f"{point.items:,}", *times, f"{point.peak_mib:.0f}", f"{point.kib:.2f}"]
        )
    lines = [*markdown(cells), ""]
    for name, points in (("users", by_users), ("items", by_items)):
        sizes = [getattr(point, name) for point in points]
        seconds = growth_exponent(sizes, [point.seconds for point in points])
        memory = growth_exponent(sizes, [point.peak_mib - point.start_mib for point in points])
        lines.append(f"- growth exponent in {name}: time {seconds:.2f}, memory {memory:.2f}")
    return lines


def page(content: Mapping[str, Any]) -> str:
    """The page of a measurement, from the content of its JSON file."""
    by_users, by_items = ([Point(**point) for point in content[name]] for name in ("by_users", "by_items"))
    versions = ", ".join(f"{name} {value}" for name, value in content["versions"].items())
    lines = ["# Growth of candidate generation", "", EXPLAINED, "", *table(by_users, by_items), ""]
    lines += ["## How it was measured", "", "```", content["command"], "```", ""]
    return "\n".join([*lines, f"Machine: {content['hardware']}", "", f"Versions: {versions}"]) + "\n"


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line; prints the table, and writes JSON and page if a file is named."""
    parser = command_parser("scale", __doc__)
    sizes = "10000,100000,1000000"
    parser.add_argument(
        "--users", default=sizes, help=f"numbers of users, comma-separated (default: {sizes})"
    )
    parser.add_argument(
        "--items", default=sizes, help=f"numbers of items, comma-separated (default: {sizes})"
    )
    parser.add_argument("--output", type=Path, help="the JSON file; the page lies beside it as .md")
    parser.add_argument("--point", action="store_true", help=argparse.SUPPRESS)
    known = parser.parse_args(arguments)
    users, items = ([int(size) for size in text.split(",")] for text in (known.users, known.items))
    if known.point:
        sys.stdout.write(json.dumps(vars(measure_point(users[0], items[0]))))
        return
    plan = [*((size, min(items)) for size in users), *((min(users), size) for size in items)]
    measured = {pair: measure_apart(*pair) for pair in tqdm(dict.fromkeys(plan), "catalogues", disable=None)}
    by_users = [measured[size, min(items)] for size in users]
    by_items = [measured[min(users), size] for size in items]
    sys.stdout.write("\n".join(table(by_users, by_items)) + "\n")
    if known.output:
        given = sys.argv[1:] if arguments is None else arguments
        content = {
            "command": " ".join(["python -m recbole_dgr2.scale", *given]),
            "by_users": [vars(point) for point in by_users],
            "by_items": [vars(point) for point in by_items],
            "hardware": hardware(),
            "versions": library_versions(),
        }
        write_text(known.output, json.dumps(content, indent=1) + "\n")
        write_text(known.output.with_suffix(".md"), page(content))


if __name__ == "__main__":
    sys.exit(main())
