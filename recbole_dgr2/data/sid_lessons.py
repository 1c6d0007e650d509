"""What teaches a language model semantic IDs: the next item of a history, an item's text, and the item of a text.

Histories and next items are training interactions, and none is the target of a training list either: the lists must
be new to a model that learns from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.parts import holdout_lengths
from recbole_dgr2.data.prompt import plain
from recbole_dgr2.data.sequences import Rows, Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HISTORY_ITEMS = 10
"""Most recent items of a history that a lesson shows."""
TITLE_WORDS = 12
"""Words of a title that a lesson shows or asks for."""
NEXT, DESCRIBE, FIND = "bought{history}\nnext:", "item {sid}\nis:", "item:{text}\nis:"


@dataclass(frozen=True)
class SidLesson:
    """A question and its answer; neither holds what the tokenizer adds."""

    prompt: str
    response: str


def write_sid_lessons(
    item_text: ItemText, sequences: Sequences, last_m: int, most: int, seed: int
) -> list[SidLesson]:
    """Next-item lessons, at most `most` of them drawn by seed, then two lessons for every item with text.

    Args:
        item_text: texts and semantic IDs of all items.
        sequences: all interactions; validation, test and the `last_m` training targets of each user are left out.
        last_m: training lists a user, whose targets are left out; 0 for none.
        most: next-item lessons.
        seed: decides which.

    Raises:
        ValueError: the items have no semantic IDs.
    """
    if item_text.sids is None:
        raise ValueError("mid_training: the items have no semantic IDs; set semantic_ids to kmeans or rqvae")
    rows = lesson_rows(sequences, last_m)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
    rows = rows.take(drawn)
    histories, targets = rows.histories(sequences, HISTORY_ITEMS), rows.targets(sequences).tolist()
    lessons = []
    for history, target in zip(histories, targets, strict=True):
        shown = "".join(f" {item_text.sid(item)}" for item in history.tolist())
        lessons.append(SidLesson(NEXT.format(history=shown), f" {item_text.sid(target)}"))
    for item in range(1, len(item_text)):
        text, sid = _words(item_text, item), item_text.sid(item)
        if text:
            lessons += [
                SidLesson(DESCRIBE.format(sid=sid), text),
                SidLesson(FIND.format(text=text), f" {sid}"),
            ]
    return lessons


def lesson_rows(sequences: Sequences, last_m: int) -> Rows:
    """Every interaction after a user's first that is in training and no target of a training list, as a target."""
    kept = holdout_lengths(sequences, last_m)
    users = np.repeat(np.arange(sequences.n_users, dtype=np.int64), np.maximum(kept - 1, 0))
    before = np.cumsum(np.maximum(kept - 1, 0)) - np.maximum(kept - 1, 0)
    return Rows(users, np.arange(len(users), dtype=np.int64) - before[users] + 1)


def _words(item_text: ItemText, item: int) -> str:
    """Title, categories and brand of an item, "" where nothing is known."""
    title = " ".join(item_text.titles[item].split()[:TITLE_WORDS])
    kinds = " ".join(item_text.categories[item])
    parts = [part for part in (title, kinds, item_text.brands[item]) if part]
    return f" {plain('; '.join(parts))}" if parts else ""


def sid_lesson_texts(lessons: Sequence[SidLesson]) -> Iterator[str]:
    """Question and answer of each lesson as one text, for the tokenizer's corpus."""
    for lesson in lessons:
        yield lesson.prompt + lesson.response


def encode_sid_lessons(lessons: Sequence[SidLesson], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Training examples; every response token counts as answer, and EOS ends it."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    eos = int(tokenizer.eos_token_id)
    return [
        Example(key, tuple(ids(lesson.prompt)), (*ids(lesson.response), eos), 0)
        for key, lesson in enumerate(lessons)
    ]
