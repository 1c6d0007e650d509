"""The small catalogue in prompts: a tokenizer that knows its words, and builders of prompts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import (
    PromptBuilder,
    label,
)
from recbole_dgr2.model.backbone import train_tokenizer
from tests.reranking import ITEMS, task, template

LABELS = [label(slot) for slot in range(5)]
CORPUS = ["taste light\n- red lamp\n<c1> blue lamp m2 p1\nrank:"] * 4


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CORPUS, 300, LABELS)


def builder(items: ItemText = ITEMS, max_tokens: int = 10_000, **options: Any) -> PromptBuilder:
    return PromptBuilder(template(**options), items, tokenizer(), max_tokens)


def decoded(ids: tuple[int, ...]) -> str:
    return str(tokenizer().decode(list(ids)))


def titled(*titles: str) -> ItemText:
    """Items with these titles, from item 1 on, that are of the kind <c1>."""
    return ItemText(("", *titles), ((), *((title,) for title in titles)), ("", *titles))


SHOWN = task(history=(4, 1, 2), candidates=(3, 5, 1), levels=[[1, 0, 2], [0, 3, 0], [2, 2, 2]])
"""One list for the shipped prompts."""
