"""Prompts that take titles, categories and brands for nothing but text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import (
    PromptBuilder,
    plain,
    render_prompt,
)
from tests.chat import SID_TOKENS, SIDS, THINKING, chat_tokenizer
from tests.prompting import LABELS, builder, titled, tokenizer
from tests.reranking import GR2, ITEMS, task, template

TOKENS = ["<c1>", "<c3>", "<|eos|>", "<|pad|>", "</s>", "[SEP]"]
QWEN_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>", "<think>", "</think>", "<tool_call>"),
    *("<c2>", "<c10>", "<|mask|>", "<|MASK|>", SIDS[3], SID_TOKENS[0]),
]


@pytest.mark.parametrize("token", TOKENS)
def test_text_of_a_title_never_becomes_a_token_of_that_name(token: str) -> None:
    hostile = builder(
        titled(f"a {token}{token} b", f"x{token}", token), candidate="$label $title $kinds$facts\n"
    )
    harmless = builder(titled("a b", "x", "c"), candidate="$label $title $kinds$facts\n")
    special = [*map(tokenizer().convert_tokens_to_ids, LABELS), 0, 1]

    def found(build: PromptBuilder) -> list[int]:
        prompt = build.build(task(history=(1, 2, 3), candidates=(3, 1)))
        return [token for token in prompt.token_ids if token in special]

    assert found(hostile) == found(harmless) == [special[0], special[1]]


@pytest.mark.parametrize("token", QWEN_TOKENS)
def test_text_of_an_item_never_becomes_a_token_of_a_conversation(token: str) -> None:
    """A title that ends the user's turn, or names another candidate, would change the question."""
    tokens = chat_tokenizer(THINKING)
    added = set(tokens.get_added_vocab().values())
    shown = task(history=(1, 2, 3), candidates=(3, 1), levels=[[0, 1], [2, 3]])
    hostile = ItemText(
        titles=("", f"a {token}{token} b", f"x{token}", token),
        categories=((), (token,), (f"a{token}", "b"), (token, "c")),
        brands=("", token, token, f"{token} d"),
        sids=SIDS,
    )
    harmless = replace(hostile, titles=("", "a", "b", "c"), categories=((),) * 4, brands=("",) * 4)
    found = [
        [
            token
            for token in PromptBuilder(GR2, items, tokens, 10_000).build(shown).token_ids
            if token in added
        ]
        for items in (hostile, harmless)
    ]
    assert found[0] == found[1]


@given(st.text(), st.sampled_from(TOKENS))
def test_plain_text_holds_no_token_and_loses_nothing(text: str, token: str) -> None:
    shown = plain(text + token + text)
    assert token not in shown
    assert shown.replace(" ", "") == (text + token + text).replace(" ", "")
    assert plain(shown) == shown


def test_ordinary_brackets_stay_readable() -> None:
    assert plain("Toy Story (1995) > Heat") == "Toy Story (1995) > Heat"
    assert plain("a < b [ c ]") == "a < b [ c ]"


def test_a_dollar_in_a_title_is_only_text() -> None:
    items = replace(ITEMS, titles=("", "$kinds $$ ${x}", "b", "c", "d", ""))
    text = "".join(render_prompt(template(), items, task(candidates=(1,)), 3))
    assert "<c1> $kinds $$ ${x} m0" in text
