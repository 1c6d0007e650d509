"""Prompts that keep every candidate and stay within their budget of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import (
    Prompt,
    PromptBuilder,
    TokenLimits,
    label,
    plain,
    render_prompt,
)
from recbole_dgr2.data.tasks import RankingTask
from tests.chat import SID_TOKENS, SIDS, THINKING, chat_tokenizer
from tests.prompting import builder, decoded, titled, tokenizer
from tests.reranking import GR2, ITEMS, task, template


def test_too_long_prompts_lose_their_oldest_history_first() -> None:
    long = task(history=(1, 2, 4), candidates=(3, 5, 2))
    whole = builder(history_items=3).build(long)
    seen = []
    for limit in range(len(whole.token_ids), 0, -1):
        try:
            prompt = builder(history_items=3, max_tokens=limit).build(long)
        except ValueError as error:
            assert str(error).startswith(f"list {long.key}: the prompt has ")
            assert f"leaves {limit}; lower one of the two or n_candidates" in str(error)
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


@settings(max_examples=60)
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


@settings(max_examples=40)
@given(st.composite(lists)(), st.booleans())
def test_lines_tokenised_apart_are_the_prompt_tokenised_whole(
    drawn: tuple[ItemText, RankingTask], chat: bool
) -> None:
    """A pretrained model meets a prompt in the tokens that it knows."""
    items, given_task = drawn
    tokens = chat_tokenizer(THINKING) if chat else tokenizer()
    prompt = PromptBuilder(GR2, items, tokens, 100_000).build(given_task)
    assert list(prompt.token_ids) == tokens.encode(tokens.decode(prompt.token_ids), add_special_tokens=False)
