"""Lessons as text and as token ids."""

from __future__ import annotations

import pytest

from recbole_dgr2.data.lessons import encode_lessons, lesson_texts, write_lessons
from recbole_dgr2.data.prompt import PromptBuilder, label, render_prompt
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.model.backbone import train_tokenizer
from tests.chat import ALWAYS_THINKING, NO_SYSTEM, PLAIN_TURNS, THINKING, chat_tokenizer
from tests.reranking import GR2, ITEMS, NAMED, reasoner, task, template

TASKS = [task(key=3, levels=[[1, 1], [2, 0], [0, 3]]), task(key=9, history=(), candidates=(5,))]
TEMPLATE = template()
LESSONS = write_lessons(TASKS, reasoner(), TEMPLATE, ITEMS)
TEXTS = list(lesson_texts(LESSONS, TEMPLATE, ITEMS))


def test_texts_are_prompt_and_trace() -> None:
    assert [lesson.task for lesson in LESSONS] == TASKS
    for lesson, text in zip(LESSONS, TEXTS, strict=True):
        shown = "".join(render_prompt(TEMPLATE, ITEMS, lesson.task, 3))
        assert text == shown + lesson.trace.text


def test_examples_hold_the_same_text_and_end_with_eos() -> None:
    tokenizer = train_tokenizer(TEXTS, 320, [label(slot) for slot in range(3)])
    eos = tokenizer.eos_token_id
    prompts = PromptBuilder(TEMPLATE, ITEMS, tokenizer, 10_000)
    examples = encode_lessons(LESSONS, prompts, tokenizer, eos)
    for example, lesson, text in zip(examples, LESSONS, TEXTS, strict=True):
        assert example.key == lesson.task.key
        assert example.response_ids[-1] == eos
        assert example.response_ids.count(eos) == 1
        assert tokenizer.decode([*example.prompt_ids, *example.response_ids[:-1]]) == text
        assert tokenizer.decode(example.response_ids[: example.answer_start]) == lesson.trace.reasoning
        assert tokenizer.decode(example.response_ids[example.answer_start : -1]) == lesson.trace.answer
    assert encode_lessons([], prompts, tokenizer, eos) == []
    with pytest.raises(ValueError, match="list 3: the prompt has"):
        encode_lessons(LESSONS, PromptBuilder(TEMPLATE, ITEMS, tokenizer, 5), tokenizer, eos)


@pytest.mark.parametrize("written", [THINKING, ALWAYS_THINKING, PLAIN_TURNS, NO_SYSTEM])
def test_a_lesson_is_a_conversation_as_the_tokenizer_writes_it(written: str) -> None:
    """Prompt, thoughts, answer and end of turn: with one thinking tag, and one end."""
    tokenizer = chat_tokenizer(written)
    lessons = write_lessons(TASKS, reasoner(), GR2, NAMED)
    prompts = PromptBuilder(GR2, NAMED, tokenizer, 10_000)
    think, stop = tokenizer.convert_tokens_to_ids(["<think>", "<|im_end|>"])
    for example, lesson in zip(
        encode_lessons(lessons, prompts, tokenizer, tokenizer.eos_token_id), lessons, strict=True
    ):
        ids = [*example.prompt_ids, *example.response_ids]
        assert ids.count(think) == 1
        assert example.response_ids[0] == think
        assert example.response_ids.index(stop) == len(example.response_ids) - 1
        assert tokenizer.decode(ids).endswith(f"<|im_start|>assistant\n{lesson.trace.text}<|im_end|>")
        assert tokenizer.decode(example.response_ids[example.answer_start : -1]) == lesson.trace.answer
        assert parse_ranking(lesson.trace.text, len(lesson.task.candidates), True).valid


def test_the_plain_form_of_a_conversation_is_in_the_corpus() -> None:
    lessons = write_lessons(TASKS, reasoner(), GR2, NAMED)
    tokenizer = chat_tokenizer(None)
    prompts = PromptBuilder(GR2, NAMED, tokenizer, 10_000)
    for example, text in zip(
        encode_lessons(lessons, prompts, tokenizer, tokenizer.eos_token_id),
        lesson_texts(lessons, GR2, NAMED),
        strict=True,
    ):
        assert tokenizer.decode([*example.prompt_ids, *example.response_ids[:-1]]) == text
        assert text.startswith(GR2.fill("system") + "\nHistory of the user")
