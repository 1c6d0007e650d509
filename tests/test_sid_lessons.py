"""Lessons on semantic IDs: what they say, and that no interaction which must stay unseen is in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.sequences import Sequences, leave_one_out_rows
from recbole_dgr2.data.sid_lessons import (
    HISTORY_ITEMS,
    TITLE_WORDS,
    encode_sid_lessons,
    lesson_rows,
    sid_lesson_texts,
    write_sid_lessons,
)
from recbole_dgr2.model.backbone import train_tokenizer

ITEMS = ItemText(
    titles=("", "Red <c1> Polish", "", "Mint Shampoo", ""),
    categories=((), ("Nails", "Polish"), ("Hair",), (), ()),
    brands=("", "Opi", "", "", ""),
    sids={item: f"<a_{item}><b_0>" for item in range(1, 5)},
)


def sequences(*users: list[int], n_items: int = 5) -> Sequences:
    """User 0 is padding."""
    lengths = [0, *(len(user) for user in users)]
    flat = np.array([item for user in users for item in user], dtype=np.int64)
    return Sequences(len(lengths), n_items, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), flat)


def test_lessons_by_hand() -> None:
    # training: 1 2 3 of user 1 (4 is the validation and 1 the test item); none is held out for training lists
    lessons = write_sid_lessons(ITEMS, sequences([1, 2, 3, 4, 1]), last_m=0, most=10, seed=0)
    said = [(lesson.prompt, lesson.response) for lesson in lessons]
    assert said == [
        ("bought <a_1><b_0>\nnext:", " <a_2><b_0>"),
        ("bought <a_1><b_0> <a_2><b_0>\nnext:", " <a_3><b_0>"),
        ("item <a_1><b_0>\nis:", " Red < c1> Polish; Nails Polish; Opi"),
        ("item: Red < c1> Polish; Nails Polish; Opi\nis:", " <a_1><b_0>"),
        ("item <a_2><b_0>\nis:", " Hair"),
        ("item: Hair\nis:", " <a_2><b_0>"),
        ("item <a_3><b_0>\nis:", " Mint Shampoo"),
        ("item: Mint Shampoo\nis:", " <a_3><b_0>"),
    ]
    assert next(sid_lesson_texts(lessons)) == "bought <a_1><b_0>\nnext: <a_2><b_0>"


def test_targets_of_training_lists_are_left_out() -> None:
    rows = lesson_rows(sequences([1, 2, 3, 4, 1], [1, 2], [3]), last_m=1)
    assert list(zip(rows.users.tolist(), rows.ends.tolist(), strict=True)) == [(1, 1)]
    none = lesson_rows(sequences([1, 2, 3, 4, 1], [1, 2], [3]), last_m=9)
    assert len(none) == 0


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 4))
def test_no_lesson_holds_a_validation_test_or_training_list_target(lengths: list[int], last_m: int) -> None:
    """Every interaction is an item of its own, so that an item in a lesson tells which interaction is in it."""
    starts = np.cumsum([0, *lengths])
    users = [list(range(1 + a, 1 + b)) for a, b in pairwise(starts.tolist())]
    n_items = int(starts[-1]) + 2
    data = sequences(*users, n_items=n_items)
    text = ItemText(
        ("",) * n_items,
        ((),) * n_items,
        ("",) * n_items,
        sids={item: f"<a_{item}>" for item in range(1, n_items)},
    )
    lessons = write_sid_lessons(text, data, last_m, most=10**6, seed=0)
    told = "".join(sid_lesson_texts(lessons))
    unseen = [
        *leave_one_out_rows(data, "valid").targets(data),
        *leave_one_out_rows(data, "test").targets(data),
    ]
    if last_m:
        unseen += list(leave_one_out_rows(data, "train", last_m).targets(data))
    for item in unseen:
        assert f"<a_{item}>" not in told


def test_validation_and_test_items_change_no_lesson() -> None:
    one = write_sid_lessons(ITEMS, sequences([1, 2, 3, 4, 1], [4, 3, 2, 2, 2]), 1, 10, 0)
    two = write_sid_lessons(ITEMS, sequences([1, 2, 1, 1, 2], [4, 3, 3, 3, 3]), 1, 10, 0)
    assert one == two


def test_next_item_lessons_are_drawn_by_seed() -> None:
    data = sequences(*[[1, 2, 3, 4, 1, 2, 3]] * 9)

    def drawn(seed: int) -> list[tuple[str, str]]:
        lessons = write_sid_lessons(ITEMS, data, 0, 5, seed)
        return [(lesson.prompt, lesson.response) for lesson in lessons if lesson.prompt.startswith("bought")]

    assert len(drawn(0)) == 5 and drawn(0) == drawn(0)
    assert any(drawn(seed) != drawn(0) for seed in range(1, 5))
    assert not [lesson for lesson in write_sid_lessons(ITEMS, data, 0, 0, 0) if "bought" in lesson.prompt]


def test_long_histories_and_titles_are_cut() -> None:
    words = " ".join(f"w{number}" for number in range(40))
    items = replace(ITEMS, titles=("", words, "", "", ""))
    lessons = write_sid_lessons(items, sequences([1, 2, 3, 4] * 8), 0, 100, 0)
    assert max(lesson.prompt.count("<a_") for lesson in lessons) == HISTORY_ITEMS
    assert max(lesson.response.count(" w") for lesson in lessons) == TITLE_WORDS


def test_items_without_semantic_ids() -> None:
    with pytest.raises(ValueError, match="no semantic IDs; set semantic_ids to kmeans or rqvae"):
        write_sid_lessons(replace(ITEMS, sids=None), sequences([1, 2, 3]), 0, 10, 0)


def test_examples_are_one_token_a_code_and_end_with_eos() -> None:
    lessons = write_sid_lessons(ITEMS, sequences([1, 2, 3, 4, 1]), 0, 10, 0)
    added = [*(f"<a_{item}>" for item in range(1, 5)), "<b_0>"]
    tokenizer = train_tokenizer(sid_lesson_texts(lessons), 320, added)
    examples = encode_sid_lessons(lessons, tokenizer)
    assert [example.key for example in examples] == list(range(8))
    for lesson, example in zip(lessons, examples, strict=True):
        assert example.answer_start == 0
        assert example.response_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(example.prompt_ids) == lesson.prompt
        assert tokenizer.decode(example.response_ids[:-1]) == lesson.response
    ids = tokenizer.convert_tokens_to_ids(["<a_2>", "<b_0>"])
    assert list(examples[0].response_ids[-3:-1]) == ids
