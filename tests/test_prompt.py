"""Prompts that keep every candidate, stay within their budget, and take titles for nothing but text."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import (
    Prompt,
    PromptBuilder,
    TokenLimits,
    history_kinds,
    label,
    plain,
    render_prompt,
    require_sids,
    slot_of_label,
)
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import load_template
from recbole_dgr2.model.backbone import train_tokenizer
from recbole_dgr2.system.paths import prompt_file
from tests.chat import SID_TOKENS, SIDS, THINKING, chat_tokenizer
from tests.reranking import ITEMS, task, template

LABELS = [label(slot) for slot in range(5)]
NAMED = replace(ITEMS, sids=SIDS)
GR2 = load_template(prompt_file("gr2"))
COMPACT = load_template(prompt_file("compact"))
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


def test_too_long_prompts_lose_their_oldest_history_first() -> None:
    long = task(history=(1, 2, 4), candidates=(3, 5, 2))
    whole = builder(history_items=3).build(long)
    seen = []
    for limit in range(len(whole.token_ids), 0, -1):
        try:
            prompt = builder(history_items=3, max_tokens=limit).build(long)
        except ValueError as error:
            assert str(error).startswith(f"list {long.key}: the prompt has ")
            assert f"leaves {limit}; lower n_candidates" in str(error)
            break
        assert len(prompt.token_ids) <= limit
        text = decoded(prompt.token_ids)
        seen.append(text.count("- "))
        expected = "".join(f"- {ITEMS.titles[item]}\n" for item in (1, 2, 4)[3 - seen[-1] :])
        assert text.startswith(f"taste light seat\n{expected}<c1>")
        for slot, (start, end) in enumerate(prompt.candidate_spans):
            assert decoded(prompt.token_ids[start:end]).startswith(label(slot))
        assert len(prompt.candidate_spans) == 3
    assert list(dict.fromkeys(seen)) == [3, 2, 1, 0]


def test_kinds_are_the_frequent_ones_of_recent_items() -> None:
    assert history_kinds(ITEMS, (1, 2, 4)) == ["light", "seat"]
    assert history_kinds(ITEMS, (4, 2)) == ["light", "seat"]  # a tie: the newer first
    assert history_kinds(ITEMS, (2, 4)) == ["seat", "light"]
    assert history_kinds(ITEMS, (4, *[2] * 10)) == ["light"]
    assert history_kinds(ITEMS, ()) == history_kinds(ITEMS, (5,)) == ["unknown"]


# the shipped prompts
SHOWN = task(history=(4, 1, 2), candidates=(3, 5, 1), levels=[[1, 0, 2], [0, 3, 0], [2, 2, 2]])


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


# budgets
def lists(draw: st.DrawFn) -> tuple[ItemText, RankingTask]:
    """Items with titles, categories and brands of any length, and a list of them."""
    words = st.lists(st.text("abc<>|", min_size=1, max_size=6), max_size=12)
    texts = draw(st.lists(st.tuples(words, words, words), min_size=8, max_size=8))
    items = ItemText(
        titles=tuple(" ".join(title) for title, _, _ in texts),
        categories=tuple(tuple(dict.fromkeys(kinds)) for _, kinds, _ in texts),
        brands=tuple(" ".join(brand) for _, _, brand in texts),
        sids={item: SIDS[item % 5 + 1] for item in range(8)},
    )
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    history = tuple(rng.integers(0, 8, size=rng.integers(0, 9)).tolist())
    candidates = tuple(rng.integers(0, 8, size=n).tolist())
    return items, RankingTask(3, history, candidates, rng.integers(0, 8, size=(n, 4)), FACTS[:4])


def check_candidates(prompt: Prompt, items: ItemText, given_task: RankingTask, limit: int | None) -> None:
    """Every candidate's span holds its label, its semantic ID and all its facts, and no other candidate's."""
    tokens = chat_tokenizer(THINKING)
    assert len(prompt.candidate_spans) == len(given_task.candidates)
    cut = 0
    for slot, (start, end) in enumerate(prompt.candidate_spans):
        line = tokens.decode(prompt.token_ids[start:end])
        item = given_task.candidates[slot]
        facts = "".join(
            f" | {GR2.fact_words[name]} {level}"
            for name, level in zip(given_task.fact_names, given_task.levels[slot].tolist(), strict=True)
        )
        assert line.startswith(f"{label(slot)} {items.sid(item)} ")
        assert line.endswith(f"{facts}\n")
        named = [tokens.convert_tokens_to_ids(name) for name in (*map(label, range(10)), *SID_TOKENS)]
        assert sum(token in named for token in prompt.token_ids[start:end]) == 3
        assert limit is None or end - start <= limit
        title = plain(" ".join(items.title(item).split()[: GR2.title_words]))
        shown = line.removeprefix(f"{label(slot)} {items.sid(item)} ").partition(" | ")[0]
        assert title.startswith(shown.rstrip())
        cut += not line.startswith(f"{label(slot)} {items.sid(item)} {title} | ")
    assert prompt.cut_candidates >= cut


@settings(max_examples=60, deadline=None)
@given(
    st.composite(lists)(),
    st.integers(90, 140) | st.none(),
    st.integers(0, 200) | st.none(),
    st.integers(0, 900),
)
def test_budgets_hold_and_nothing_of_a_candidate_is_lost(
    drawn: tuple[ItemText, RankingTask], candidate: int | None, history: int | None, spare: int
) -> None:
    items, given_task = drawn
    tokens, limits = chat_tokenizer(THINKING), TokenLimits(candidate, history)
    free = PromptBuilder(GR2, items, tokens, 100_000, limits).build(given_task)
    bare = PromptBuilder(GR2, items, tokens, 100_000, TokenLimits(candidate, 0)).build(given_task)
    room = len(bare.token_ids) + spare
    prompt = PromptBuilder(GR2, items, tokens, room, limits).build(given_task)
    check_candidates(prompt, items, given_task, candidate)
    assert len(prompt.token_ids) <= room
    listed = min(GR2.history_items, len(given_task.history))
    kept = listed - prompt.dropped_history
    newest = given_task.history[len(given_task.history) - kept :]
    lines = ["- {} {} | {}\n".format(*history_words(items, item)) for item in newest]
    text = str(tokens.decode(prompt.token_ids))
    assert "oldest first:\n" + "".join(lines) + "Frequent" in text
    spent = len(prompt.token_ids) - len(bare.token_ids)
    assert history is None or spent <= history
    assert prompt.dropped_history >= free.dropped_history
    if kept < listed:  # the next older one would have been too much
        older = given_task.history[len(given_task.history) - kept - 1]
        line = "- {} {} | {}\n".format(*history_words(items, older))
        extra = len(tokens.encode(line, add_special_tokens=False))
        assert spent + extra > min(spare, spare if history is None else history)


def history_words(items: ItemText, item: int) -> tuple[str, str, str]:
    title = plain(" ".join(items.title(item).split()[: GR2.title_words]))
    return items.sid(item), title, plain(", ".join(items.categories[item] or ("unknown",)))


def test_words_are_cut_from_the_end_of_the_title_first() -> None:
    """Then go broad categories, then the brand; one word at a time as the budget shrinks."""
    items = replace(titled("a b", "c"), categories=((), ("k1", "k2"), ()), brands=("", "z", ""))
    line = "$label $title/$kinds/$brand$facts\n"
    seen, limit = [], 100
    while True:
        limits = TokenLimits(candidate=limit)
        try:
            prompt = PromptBuilder(template(candidate=line), items, tokenizer(), 10_000, limits).build(
                task(candidates=(1,))
            )
        except ValueError as error:
            assert str(error).startswith(
                f"candidate_tokens is {limit}: label, semantic ID and facts of a candidate"
            )
            assert str(error).endswith(f"have {limit + 1} tokens alone; expected at least {limit + 1}")
            break
        start, end = prompt.candidate_spans[0]
        assert end - start <= limit
        seen.append(decoded(prompt.token_ids[start:end]).split("<c1> ")[1].split(" m0")[0])
        assert prompt.cut_candidates == (seen[-1] != "a b/k1 k2/z")
        limit = end - start - 1
    assert seen == ["a b/k1 k2/z", "a/k1 k2/z", "/k1 k2/z", "/k2/z", "//z", "//"]


def test_what_was_trimmed_is_counted() -> None:
    shown = task(history=(1, 2, 4), candidates=(3, 5, 2))
    free = builder().build(shown)
    assert (free.dropped_history, free.cut_candidates) == (0, 0)
    short = PromptBuilder(
        template(), ITEMS, tokenizer(), 10_000, TokenLimits(candidate=10, history=14)
    ).build(shown)
    whole = [end - start for start, end in free.candidate_spans]
    assert short.cut_candidates == sum(length > 10 for length in whole) > 0
    assert 0 < short.dropped_history < 3
    two = builder(history_items=2).build(shown)
    assert two.dropped_history == 0  # the template's own choice is no trimming


def test_a_history_that_the_template_does_not_show() -> None:
    prompt = builder(max_tokens=60, opening="$kinds\n").build(task(history=(1,) * 40))
    assert prompt.dropped_history == 0
    assert "".join(render_prompt(template(opening="$kinds\n"), ITEMS, task(), 3)).count("- ") == 0


@settings(max_examples=40, deadline=None)
@given(st.composite(lists)(), st.booleans())
def test_lines_tokenised_apart_are_the_prompt_tokenised_whole(
    drawn: tuple[ItemText, RankingTask], chat: bool
) -> None:
    """A pretrained model meets a prompt in the tokens that it knows."""
    items, given_task = drawn
    tokens = chat_tokenizer(THINKING) if chat else tokenizer()
    prompt = PromptBuilder(GR2, items, tokens, 100_000).build(given_task)
    assert list(prompt.token_ids) == tokens.encode(tokens.decode(prompt.token_ids), add_special_tokens=False)


# titles are only text
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


@settings(deadline=None)
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
