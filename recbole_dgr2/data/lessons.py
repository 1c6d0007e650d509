"""Lessons: ranking tasks with the traces to learn, as texts for a tokenizer and as token ids for a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import PromptBuilder, render_prompt
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.traces import Trace, write_evidence_trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Lesson:
    """One list and the trace that ranks it."""

    task: RankingTask
    trace: Trace


def write_lessons(
    tasks: Sequence[RankingTask], reasoner: Reasoner, template: PromptTemplate, item_text: ItemText
) -> list[Lesson]:
    """Lessons with traces of the embedded `evidence` source."""
    return [Lesson(task, write_evidence_trace(task, reasoner, template, item_text)) for task in tasks]


def lesson_texts(lessons: Sequence[Lesson], template: PromptTemplate, item_text: ItemText) -> Iterator[str]:
    """Prompt and response of each lesson as one text."""
    for lesson in lessons:
        prompt = render_prompt(template, item_text, lesson.task, template.history_items)
        yield "".join(prompt) + lesson.trace.text


def encode_lessons(
    lessons: Sequence[Lesson], prompts: PromptBuilder, tokenizer: PreTrainedTokenizerBase, eos_id: int
) -> list[Example]:
    """Training examples; the response ends with EOS, reasoning and answer are tokenised apart."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    examples = []
    for lesson in lessons:
        reasoning, answer = ids(lesson.trace.reasoning), ids(lesson.trace.answer)
        examples.append(
            Example(
                key=lesson.task.key,
                prompt_ids=prompts.build(lesson.task).token_ids,
                response_ids=(*reasoning, *answer, eos_id),
                answer_start=len(reasoning),
            )
        )
    return examples
