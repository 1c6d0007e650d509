"""Prompts in a file, for decoding without the data set they come from: one JSON object a line.

    {"key": 17, "prompt_ids": [5, 9, 80], "candidates": 10, "target": 3}

`candidates` (length of the list to rank) and `target` (0-based slot of the right one in the retriever's order, null
where it is no candidate) may be left out or null; there is no accuracy then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from recbole_dgr2.cache import write_text
from recbole_dgr2.decode import Request


@dataclass(frozen=True)
class Work:
    """Requests, with the length of each list and the slot of its target where they are known."""

    requests: list[Request]
    candidates: list[int | None]
    targets: list[int | None]

    def first(self, count: int) -> Work:
        """The first `count` requests."""
        return Work(self.requests[:count], self.candidates[:count], self.targets[:count])


def read_prompts(path: Path) -> Work:
    """The prompts file; see the top of this module for its format.

    Raises:
        ValueError: a line that is not as described; the file and the line are named.
    """
    work = Work([], [], [])
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            ids = tuple(int(token) for token in entry["prompt_ids"])
            work.requests.append(Request(int(entry["key"]), ids))
            work.candidates.append(entry.get("candidates"))
            work.targets.append(entry.get("target"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            example = '{"key": 17, "prompt_ids": [5, 9, 80]}'
            raise ValueError(
                f"{path}, line {number}: expected an object like {example} ({error!r})"
            ) from error
    if not work.requests:
        raise ValueError(f"{path}: no prompts in it, expected one JSON object a line")
    return work


def write_prompts(path: Path, work: Work) -> None:
    """Write the file that `read_prompts` reads."""
    rows = zip(work.requests, work.candidates, work.targets, strict=True)
    entries = (
        {"key": request.key, "prompt_ids": request.prompt_ids, "candidates": candidates, "target": target}
        for request, candidates, target in rows
    )
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
