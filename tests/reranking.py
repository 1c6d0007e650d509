"""A small catalogue, tasks over it, and a prompt template for the tests of prompts, traces and rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from string import Template
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import label
from recbole_dgr2.data.reasoner import POINTS_PER_UNIT, Reasoner
from recbole_dgr2.data.sequences import Rows, Sequences
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import SECTIONS, PromptTemplate, load_template
from recbole_dgr2.decode.types import Completion, DecodeOptions, DecodeResult, DecodingTrace, Request
from recbole_dgr2.system.paths import prompt_file
from tests.chat import SIDS

TEXTS = {
    "opening": "taste $kinds\n$history",
    "history_item": "- $title\n",
    "candidate": "$label $title$facts\n",
    "fact": " $symbol$level",
    "closing": "rank:",
    "pattern": "<think> $kinds\n",
    "scores": "scores$scores\n",
    "score": " $label=$score",
    "strong": "$place $label$facts\n",
    "cited_fact": " $name $symbol$level",
    "answer": '</think>{"explanation":"$label has$facts","recommendations":[$ranking]}',
}

ITEMS = ItemText(
    titles=("", "red lamp", "blue lamp", "blue lamp", "old chair", ""),
    categories=((), ("home", "light"), ("light",), ("light",), ("seat",), ()),
    brands=("", "aldine", "borea", "aldine", "", ""),
)
"""Items 1 to 5; 5 has no text."""
NAMED = replace(ITEMS, sids=SIDS)
WITH_SIDS = replace(ITEMS, sids={item: f"<a_{item}><b_2><c_3><d_4>" for item in range(1, 6)})


def template(history_items: int = 3, title_words: int = 5, **texts: str) -> PromptTemplate:
    """A template; `texts` replaces sections, what is in neither is empty."""
    sections = {name: Template({**TEXTS, **texts}.get(name, "")) for name in SECTIONS}
    return PromptTemplate(sections, ("first", "second"), history_items, title_words)


GR2, COMPACT = (load_template(prompt_file(name)) for name in ("gr2", "compact"))
"""The shipped templates."""


def named_template(name: str) -> PromptTemplate:
    """A shipped one, or `template()` for "own"."""
    return template() if name == "own" else load_template(prompt_file(name))


def task(
    history: tuple[int, ...] = (1, 2),
    candidates: tuple[int, ...] = (3, 4, 1),
    levels: list[list[int]] | None = None,
    key: int = 7,
) -> RankingTask:
    """One list; its facts are the first ones of FACTS, all at level 0 by default."""
    shown = np.array(levels if levels is not None else [[0, 0]] * len(candidates), dtype=np.int64)
    return RankingTask(key, history, candidates, shown, FACTS[: shown.shape[1]])


def reasoner(n: int = 3, n_facts: int = 2, n_levels: int = 4) -> Reasoner:
    """Every level of the last fact gives a point, of the one before two, and so on; ranks do not matter."""
    weights = np.outer(np.arange(n_facts, 0, -1), np.arange(n_levels)) / POINTS_PER_UNIT
    return Reasoner(weights, np.zeros(n))


def sequences(*users: list[int], n_items: int = 6) -> Sequences:
    """Users 1, 2, ... with these items."""
    offsets = np.cumsum([0, 0, *map(len, users)]).astype(np.int64)
    items = np.array([item for user in users for item in user], dtype=np.int64)
    return Sequences(len(users) + 1, n_items, offsets, items)


def candidates(ids: list[list[int]], scores: list[list[float]] | None = None) -> Candidates:
    """Candidates of rows (user 1, end 1), (user 2, end 2), ...; scores fall by one a slot by default."""
    array = np.array(ids, dtype=np.int64)
    numbers = np.arange(1, len(array) + 1, dtype=np.int64)
    given = -np.arange(array.shape[1]) + np.zeros(array.shape) if scores is None else np.array(scores)
    return Candidates(Rows(numbers, numbers), array, np.where(array == 0, -np.inf, given).astype(np.float32))


class ScriptedDecoder:
    """Stands in for `decode`: every list gets an answer of its own, decided by its key; notes what it was given.

    `n` candidates are ranked in an order drawn by the key; one answer in five leaves its last candidate out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n: int) -> None:
        self.tokenizer = tokenizer
        self.n = n
        self.seen: list[Request] = []

    def order(self, key: int) -> list[int]:
        """The list that the answer to `key` names."""
        order = np.random.default_rng(key).permutation(self.n).tolist()
        return order[:-1] if key % 5 == 0 else order

    def __call__(
        self, model: object, requests: Sequence[Request], options: DecodeOptions, **rest: Any
    ) -> DecodeResult:
        self.seen += requests
        trace = DecodingTrace((), (), (), (), 1, 1.0, 0.0)
        completions = []
        for request in requests:
            named = ",".join(f'"{label(slot)}"' for slot in self.order(request.key))
            ids = self.tokenizer.encode(f'{{"recommendations":[{named}]}}', add_special_tokens=False)
            completions.append(Completion(request.key, (*ids, rest["eos_id"]), True, len(ids), trace))
        return DecodeResult(tuple(completions), 0.1, 0.1)
