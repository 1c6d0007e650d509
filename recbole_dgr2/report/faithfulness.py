"""Whether a model's reasoning is true to its prompt and to its own answer, computed without a judge.

The counterpart of the paper's table of reasoning quality, where a language model judges (Diffusion-GR2, Table 4):

    ids_exist       share of the labels and semantic IDs in the reasoning that stand in the prompt, together where
                    they are named together
    facts_true      share of the facts stated of a candidate that the prompt shows of it
    praise_first    whether the candidate that the explanation praises is the one put first
    consistent      whether no two statements disagree: one candidate with two scores or two levels of one fact, or a
                    candidate discussed for a place that the ranked list gives to another
    repeated_words  share of the runs of four words that occurred before
    repeated_lines  share of the lines that occurred before

Each is a value in [0, 1] an answer, where the answer says anything of the kind; means are over those answers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.data.statements import Claim, StatementReader, Statements
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_reading import IDENTIFIER
from recbole_dgr2.report.significance import Interval, bootstrap_intervals, exact_mean

MEASURES = ("ids_exist", "facts_true", "praise_first", "consistent", "repeated_words", "repeated_lines")
RUN = 4
"""Words of a run whose repetition is counted."""

_PAIR = re.compile(r"(<c[1-9][0-9]*>) ?(<a_[0-9]+>(?:<[b-z]_[0-9]+>)*)")


@dataclass(frozen=True)
class Case:
    """One raw response: the list, the prompt as the model saw it, and what it wrote."""

    task: RankingTask
    prompt: str
    text: str


@dataclass(frozen=True)
class Measured:
    """One measure: mean and 95 % interval over the `answers` that it could be taken of."""

    value: float
    ci95: Interval
    answers: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for report.json."""
        return {"value": self.value, "ci95": list(self.ci95), "answers": self.answers}


def measure_faithfulness(
    cases: Sequence[Case], template: PromptTemplate, samples: int, seed: int
) -> dict[str, Measured]:
    """The measures of a model that at least one answer has a value of.

    Args:
        cases: raw responses of one model.
        template: of the traces that it has learned.
        samples, seed: of the bootstrap.
    """
    reader = StatementReader(template)
    judged = [judge(case, reader) for case in cases]
    found = {}
    for name in MEASURES:
        values = np.array([values[name] for values in judged if name in values])
        if len(values):
            interval = bootstrap_intervals({name: values}, samples, seed)[name]
            found[name] = Measured(exact_mean(values), interval, len(values))
    return found


def faithfulness_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The measures of a report's rows as cells of a table, the header first; rows without any are left out."""
    cells = [["model", *MEASURES]]
    for row in rows:
        block = row.get("faithfulness")
        if block:
            cells.append([row["name"], *(_cell(block.get(name)) for name in MEASURES)])
    return cells


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "-"
    low, high = (f"{end:.3f}".removeprefix("0") for end in entry["ci95"])
    return f"{entry['value']:.4f} ({low}-{high})"


def judge(case: Case, reader: StatementReader) -> dict[str, float]:
    """The measures of one response; those that it gives no occasion for are left out."""
    said = reader.read(case.text)
    order = parse_ranking(case.text, len(case.task.candidates), finished=True)
    parsed = "unparsed" not in order.failures
    values: dict[str, float] = {}
    if said.cited:
        values["ids_exist"] = _existing(said, case.prompt) / len(said.cited)
    if said.claims:
        values["facts_true"] = sum(_is_true(claim, case.task) for claim in said.claims) / len(said.claims)
    if said.praised is not None and parsed:
        values["praise_first"] = float(said.praised == order.order[0])
    if said.claims or said.scores or said.promoted:
        values["consistent"] = float(_consistent(said, order.order if parsed else ()))
    values.update(_repetition(said.reasoning))
    return values


def _existing(said: Statements, prompt: str) -> int:
    """How many cited identifiers stand in the prompt; a semantic ID after another candidate's label does not count."""
    shown = set(IDENTIFIER.findall(prompt))
    pairs = set(_PAIR.findall(prompt))
    mixed = [sid for name, sid in _PAIR.findall(said.reasoning) if sid in shown and (name, sid) not in pairs]
    return sum(name in shown for name in said.cited) - len(mixed)


def _is_true(claim: Claim, task: RankingTask) -> bool:
    if not claim.sound or claim.slot >= len(task.candidates) or claim.fact not in task.fact_names:
        return False
    return int(task.levels[claim.slot, task.fact_names.index(claim.fact)]) == claim.level


def _consistent(said: Statements, order: Sequence[int]) -> bool:
    """Whether no candidate is said to be two things, and places discussed are those of the list, if there is one."""
    levels = [((claim.slot, claim.fact), claim.level) for claim in said.claims]
    if not (_single(said.scores) and _single(levels) and _single(said.promoted)):
        return False
    return all(order[place] == slot for place, slot in said.promoted if place < len(order))


def _single(pairs: Sequence[tuple[Hashable, int]]) -> bool:
    """Whether no key has two values."""
    values: Mapping[Hashable, int] = dict(pairs)
    return all(values[key] == value for key, value in pairs)


def _repetition(text: str) -> dict[str, float]:
    words, lines = text.split(), [line for line in map(str.strip, text.splitlines()) if line]
    runs = [tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)]
    found = {}
    if runs:
        found["repeated_words"] = 1 - len(set(runs)) / len(runs)
    if lines:
        found["repeated_lines"] = 1 - len(set(lines)) / len(lines)
    return found
