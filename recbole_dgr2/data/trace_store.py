"""Written traces, kept: one JSON object a line for every attempt of a source, with its provenance.

A file only grows. Nothing in it depends on time, machine or address, so the same lists, source and seed give the same
file. A line that a killed process left half-written at the end is dropped; any other line that does not fit is an
error. An attempt is known by its list, the prompt that the source saw and the settings it was written with: it is
never made twice, in this run or a later one.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recbole_dgr2.data.traces import Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What decides the text of an attempt, beside its prompt and number.

    source: evidence, hf or openai. model: the writer's name. mode: all, rejection or targeted. temperature: of the
    samples. seed: of their random numbers. max_tokens: of an answer, 0 where there is no limit. form: digest of what
    the template says of traces.
    """

    source: str
    model: str
    mode: str
    temperature: float
    seed: int
    max_tokens: int
    form: str


@dataclass(frozen=True)
class Attempt:
    """One attempt at one list, as a line of the file.

    key: the list. user, items: external ids of its user and candidates, in the retriever's order. attempt: from 0.
    prompt: hash of what the source was shown, hint included. prompt_tokens, completion_tokens: as the source counts
    them, 0 where it counts none. fault: why the attempt was turned down; empty where it was accepted. reasoning,
    answer: the trace, empty where it was turned down.
    """

    key: int
    user: str
    items: tuple[str, ...]
    source: str
    model: str
    mode: str
    temperature: float
    seed: int
    max_tokens: int
    form: str
    attempt: int
    prompt: str
    prompt_tokens: int
    completion_tokens: int
    fault: str
    reasoning: str
    answer: str

    @property
    def accepted(self) -> bool:
        """Whether the trace is kept as a lesson."""
        return not self.fault

    @property
    def settings(self) -> Settings:
        """The settings that it was written with."""
        return Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})

    @property
    def trace(self) -> Trace:
        """The kept trace."""
        return Trace(self.reasoning, self.answer)


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "tuple[str, ...]": (list,),
}


class TraceStore:
    """The attempts of one file.

    Args:
        path: the file; made with the first attempt.

    Raises:
        ValueError: a line that is no attempt; file and line are named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[Any, ...], Attempt] = {}
        self._torn: tuple[int, int] | None = None  # where a half-written last line begins and ends
        if path.exists():
            self._read(path.read_bytes())

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts, in the order of the file."""
        return list(self._known.values())

    def find(self, key: int, prompt: str, settings: Settings) -> list[Attempt]:
        """The attempts at a list with one prompt and these settings, from number 0 on."""
        found: list[Attempt] = []
        while (attempt := self._known.get((key, prompt, settings, len(found)))) is not None:
            found.append(attempt)
        return found

    def append(self, attempt: Attempt) -> None:
        """Add an attempt to the file; one that is already known is not written again."""
        if _identity(attempt) in self._known:
            return
        line = json.dumps({**asdict(attempt), "accepted": attempt.accepted}, ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            size = file.seek(0, 2)
            if self._torn is not None and size == self._torn[1]:  # else another run has gone on with the file
                size = file.truncate(self._torn[0])
            self._torn = None
            file.seek(max(size - 1, 0))
            begin = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(begin + line.encode())
        self._known[_identity(attempt)] = attempt

    def _read(self, content: bytes) -> None:
        *lines, rest = content.split(b"\n")
        if rest:
            self._torn = (len(content) - len(rest), len(content))
            logger.warning(
                "%s, line %d: half-written by a process that ended; dropped", self.path, len(lines) + 1
            )
        for number, line in enumerate(lines, start=1):
            try:
                attempt = _attempt(json.loads(line))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{self.path}, line {number}: not an attempt at a trace ({error}); "
                    "delete the line to have it written again"
                ) from error
            self._known.setdefault(_identity(attempt), attempt)


def _identity(attempt: Attempt) -> tuple[Any, ...]:
    return attempt.key, attempt.prompt, attempt.settings, attempt.attempt


def _attempt(values: Any) -> Attempt:
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    expected = {field.name: str(field.type) for field in fields(Attempt)}
    if set(values) != {*expected, "accepted"}:
        odd = sorted(set(values) ^ {*expected, "accepted"})
        raise ValueError(f"key {odd[0]!r} is {'unknown' if odd[0] in values else 'missing'}")
    for name, kind in expected.items():
        if isinstance(values[name], bool) or not isinstance(values[name], _TYPES[kind]):
            raise ValueError(f"{name} is {values[name]!r}, expected {kind}")
    read = {name: values[name] for name in expected}
    attempt = Attempt(**{**read, "items": tuple(map(str, values["items"]))})
    if values["accepted"] is not attempt.accepted or attempt.accepted != bool(attempt.answer):
        raise ValueError(
            f"accepted is {values['accepted']!r}, fault {attempt.fault!r}, answer {attempt.answer!r}"
        )
    return attempt


@dataclass(frozen=True)
class Acceptance:
    """What the attempts at some lists came to.

    lists: lists tried. accepted: lists with a kept trace. attempts: all attempts. by_attempt: entry b - 1 is the
    number of lists that had a kept trace within b attempts. faults: why attempts were turned down, most often first.
    prompt_tokens, completion_tokens: over all attempts.
    """

    lists: int
    accepted: int
    attempts: int
    by_attempt: tuple[int, ...]
    faults: dict[str, int]
    prompt_tokens: int
    completion_tokens: int

    @property
    def rate(self) -> float:
        """Share of the lists that have a kept trace."""
        return self.accepted / self.lists if self.lists else 0.0

    def within(self, attempts: int) -> float:
        """Share of the lists with a kept trace within a budget of `attempts`."""
        reached = self.by_attempt[: max(attempts, 0)]
        return reached[-1] / self.lists if reached and self.lists else 0.0

    def __str__(self) -> str:
        budgets = [b for b in (1, 2, 4, 8, 16, 32) if b < len(self.by_attempt)] + [len(self.by_attempt)]
        shares = ", ".join(f"{b}: {self.within(b):.3f}" for b in budgets)
        faults = ", ".join(f"{name} {count}" for name, count in self.faults.items()) or "none"
        return (
            f"{self.accepted} of {self.lists} lists have a trace after {self.attempts} attempts "
            f"(accepted within {shares}); turned down: {faults}; "
            f"tokens: {self.prompt_tokens} read, {self.completion_tokens} written"
        )


def acceptance(attempts: Iterable[Attempt]) -> Acceptance:
    """Counts over attempts, each list and prompt counted once."""
    every = list(attempts)
    accepted_at = [attempt.attempt for attempt in every if attempt.accepted]
    longest = max((attempt.attempt for attempt in every), default=-1) + 1
    faults = Counter(attempt.fault for attempt in every if not attempt.accepted)
    return Acceptance(
        lists=len({(attempt.key, attempt.prompt, attempt.settings) for attempt in every}),
        accepted=len(accepted_at),
        attempts=len(every),
        by_attempt=tuple(_cumulative(accepted_at, longest)),
        faults=dict(sorted(faults.items(), key=lambda entry: (-entry[1], entry[0]))),
        prompt_tokens=sum(attempt.prompt_tokens for attempt in every),
        completion_tokens=sum(attempt.completion_tokens for attempt in every),
    )


def _cumulative(accepted_at: Sequence[int], longest: int) -> list[int]:
    counts = Counter(accepted_at)
    return [sum(counts[earlier] for earlier in range(budget + 1)) for budget in range(longest)]
