"""Prompts word for word: labels, candidates, history, and the shipped templates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recbole_dgr2.data.prompt import (
    PromptBuilder,
    history_kinds,
    label,
    render_prompt,
    require_sids,
    slot_of_label,
)
from tests.chat import SIDS, THINKING, chat_tokenizer
from tests.prompting import SHOWN, builder, decoded, tokenizer
from tests.reranking import COMPACT, GR2, ITEMS, NAMED, task, template


# labels
def test_labels() -> None:
    assert [slot_of_label(label(slot)) for slot in range(100)] == list(range(100))
    for text in ("c1", "<c0>", "<c01>", "<c1", "<c1> ", "<C1>", "<c-1>", "", "<c" + "9" * 5000 + ">"):
        assert slot_of_label(text) is None


def test_labels_are_single_tokens_in_the_prompt() -> None:
    prompt = builder().build(task())
    for slot, (start, end) in enumerate(prompt.candidate_spans):
        assert prompt.token_ids[start] == tokenizer().convert_tokens_to_ids(label(slot))
        assert decoded(prompt.token_ids[start:end]).startswith(label(slot))


# prompts
def test_a_prompt_by_hand() -> None:
    shown = task(history=(4, 1, 2), candidates=(3, 5), levels=[[1, 0], [0, 3]])
    prompt = builder(history_items=2, title_words=1).build(shown)
    text = "taste light home\n- red\n- blue\n<c1> blue m1 p0\n<c2> unknown m0 p3\nrank:"
    assert decoded(prompt.token_ids) == text
    spans = [decoded(prompt.token_ids[start:end]) for start, end in prompt.candidate_spans]
    assert spans == ["<c1> blue m1 p0\n", "<c2> unknown m0 p3\n"]


def test_fewer_history_items_than_asked_for() -> None:
    for history in ((), (1,), (1, 2), (1, 2, 4), (4, 1, 2, 4)):
        text = "".join(render_prompt(template(), ITEMS, task(history=history), 3))
        assert text.count("- ") == min(len(history), 3)
        assert decoded(builder().build(task(history=history)).token_ids) == text


def test_kinds_are_the_frequent_ones_of_recent_items() -> None:
    assert history_kinds(ITEMS, (1, 2, 4)) == ["light", "seat"]
    assert history_kinds(ITEMS, (4, 2)) == ["light", "seat"]  # a tie: the newer first
    assert history_kinds(ITEMS, (2, 4)) == ["seat", "light"]
    assert history_kinds(ITEMS, (4, *[2] * 10)) == ["light"]
    assert history_kinds(ITEMS, ()) == history_kinds(ITEMS, (5,)) == ["unknown"]


# the shipped prompts
def test_the_compact_prompt_word_for_word() -> None:
    text = "likes light home\n- blue lamp\n m1 p0 n2<c1>\n m0 p3 n0<c2>\n m2 p2 n2<c3>\nrank:"
    assert "".join(render_prompt(COMPACT, ITEMS, SHOWN, 9)) == text
    prompt = PromptBuilder(COMPACT, ITEMS, tokenizer(), 10_000).build(SHOWN)
    assert decoded(prompt.token_ids) == text


def test_the_gr2_prompt_word_for_word() -> None:
    message = (
        "History of the user, oldest first:\n"
        "- <a_1><b_4> old chair | seat\n"
        "- <a_1><b_1> red lamp | home, light\n"
        "- <a_2><b_2> blue lamp | light\n"
        "Frequent categories: light, home\n"
        "Candidates in the order of the retriever:\n"
        "<c1> <a_0><b_3> blue lamp | light | brand aldine"
        " | retriever score 1 | popularity 0 | follows the last item 2\n"
        "<c2> <a_2><b_5> unknown item | unknown | brand unknown"
        " | retriever score 0 | popularity 3 | follows the last item 0\n"
        "<c3> <a_1><b_1> red lamp | home, light | brand aldine"
        " | retriever score 2 | popularity 2 | follows the last item 2\n"
    )
    turns = [
        {"role": "system", "content": GR2.fill("system")},
        {"role": "user", "content": message + GR2.fill("closing")},
    ]
    tokens = chat_tokenizer(THINKING)
    whole = tokens.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prompt = PromptBuilder(GR2, NAMED, tokens, 10_000).build(SHOWN)
    assert tokens.decode(prompt.token_ids) == whole
    assert list(prompt.token_ids) == tokens.encode(str(whole), add_special_tokens=False)
    plain_form = "".join(render_prompt(GR2, NAMED, SHOWN, 9))
    assert plain_form == f"{GR2.fill('system')}\n{turns[1]['content']}\n"


def test_items_without_a_semantic_id_show_none() -> None:
    few = replace(ITEMS, sids={3: SIDS[3]})
    lines = render_prompt(GR2, few, SHOWN, 9)
    assert [("<a_" in line) for line in lines] == [False, True, False, False, False]


def test_semantic_ids_that_are_missing() -> None:
    with pytest.raises(
        ValueError, match=r"^prompt 'gr2' uses \$sid, but .* set semantic_ids, or use a prompt"
    ):
        PromptBuilder(GR2, ITEMS, chat_tokenizer(THINKING), 10_000)
    require_sids(COMPACT, False)
