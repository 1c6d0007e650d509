"""Answers of the student: what is kept of one, where its ranked list begins, and which lists are answered when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbole_dgr2.data.examples import Example
from recbole_dgr2.model.replay import Trajectory


@dataclass(frozen=True)
class Answered:
    """One answer of the student.

    list_key: of the list that was asked for. answer_start: slot at which the ranked list begins, the answer's length
    where there is none. example: of the same list, where supervised traces are asked for.
    """

    trajectory: Trajectory
    list_key: int
    answer_start: int
    example: Example | None

    @property
    def key(self) -> int:
        """That of the trajectory."""
        return self.trajectory.key

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Answered:
        """Inverse of `dataclasses.asdict`, through JSON."""
        trace = values["example"]
        trajectory = Trajectory(**_tuples(values["trajectory"]))
        example = None if trace is None else Example(**_tuples(trace))
        return cls(trajectory, values["list_key"], values["answer_start"], example)


def answer_marker(examples: Sequence[Example]) -> tuple[int, ...]:
    """Tokens that every answer begins with, by which the ranked list of a decoded answer is found.

    Those shared by the answers of all examples; where they share none, the one that most begin with. Empty where no
    example has an answer.
    """
    answers = [example.response_ids[example.answer_start :] for example in examples]
    answers = [answer for answer in answers if answer]
    if not answers:
        return ()
    low, high = min(answers), max(answers)
    shared = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[:shared] or (Counter(answer[0] for answer in answers).most_common(1)[0][0],)


def answer_start(tokens: Sequence[int], marker: tuple[int, ...]) -> int:
    """Index of the first `marker` in `tokens`; their number where there is none: all of it is reasoning then."""
    size = len(marker)
    starts = range(len(tokens) - size + 1) if size else range(0)
    return next((at for at in starts if tuple(tokens[at : at + size]) == marker), len(tokens))


def turn_of(total: int, count: int, seed: int, iteration: int) -> list[int]:
    """Indices of the `count` lists (all, if there are fewer) of one iteration, each once, in an order drawn for each
    round. A round has as many iterations as there are lists for; the few that are left over sit it out.
    """
    count = min(count, total)
    turn, place = divmod(iteration, total // count)
    order = np.random.default_rng([seed, turn]).permutation(total)
    return order[place * count : (place + 1) * count].tolist()  # type: ignore[no-any-return]


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a frozen dataclass from JSON: lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
