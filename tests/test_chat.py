"""The frame of a conversation: the tokenizer's own form, one thinking tag, the same every day, or a plain form."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from string import Template

import pytest
from transformers import PreTrainedTokenizerFast

from recbole_dgr2.data.chat import Frame, end_of_turn, end_with_turn, frame_of
from recbole_dgr2.data.prompt import PromptBuilder
from recbole_dgr2.data.template import PromptTemplate
from tests.chat import ALWAYS_THINKING, DATED, NO_SYSTEM, PLAIN_TURNS, THINKING, chat_tokenizer
from tests.reranking import GR2, ITEMS, template


def chatting(pattern: str = "<think>\n", system: str = "be brief", name: str = "own") -> PromptTemplate:
    """A small template of a conversation."""
    made = template(system=system, pattern=pattern)
    return replace(made, chat=True, name=name)


def test_a_frame_by_hand() -> None:
    assert frame_of(chatting(), chat_tokenizer(THINKING)) == Frame(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("written", [THINKING, PLAIN_TURNS, DATED])
def test_a_frame_is_what_the_tokenizer_writes_around_any_message(written: str) -> None:
    tokenizer = chat_tokenizer(written)
    frame = frame_of(GR2, tokenizer)
    for text in ("Rank these.", "- <c1> a\n- b", "<|im_start|> is only a name", "the message of the user"):
        messages = [{"role": "system", "content": GR2.fill("system")}, {"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        shown = frame.head + text + frame.tail
        if written is DATED:
            assert shown.partition("<|im_end|>")[2] == str(whole).partition("<|im_end|>")[2]
        else:
            assert shown == whole


@pytest.mark.parametrize("written", [THINKING, ALWAYS_THINKING, PLAIN_TURNS, NO_SYSTEM])
def test_one_thinking_tag_whoever_opens_it(written: str) -> None:
    frame = frame_of(chatting("<think>\nwell\n"), chat_tokenizer(written))
    assert "<think>" not in frame.head + frame.tail
    assert frame.tail.endswith("<|im_start|>assistant\n")


def test_a_trace_without_thoughts() -> None:
    silent = chatting("well: ")
    assert frame_of(silent, chat_tokenizer(THINKING)).tail.endswith("assistant\n<think>\n\n</think>\n\n")
    assert frame_of(silent, chat_tokenizer(PLAIN_TURNS)).tail.endswith("assistant\n")
    with pytest.raises(
        ValueError, match=r"prompt 'own': .* opens <think>, so the section 'pattern' must begin"
    ):
        frame_of(silent, chat_tokenizer(ALWAYS_THINKING))


def test_a_tokenizer_without_a_system_role() -> None:
    frame = frame_of(chatting(), chat_tokenizer(NO_SYSTEM))
    assert frame.head == "<|im_start|>user\nbe brief\n\n"


def test_a_template_without_system_text() -> None:
    assert frame_of(chatting(system=""), chat_tokenizer(NO_SYSTEM)).head == "<|im_start|>user\n"


def test_the_day_changes_no_prompt() -> None:
    frame = frame_of(chatting(), chat_tokenizer(DATED))
    assert "Today is 1 January 2025<|im_end|>" in frame.head


def test_the_plain_form() -> None:
    made = chatting()
    assert frame_of(made, None) == frame_of(made, chat_tokenizer(None)) == Frame("be brief\n", "\n")
    assert frame_of(template(), chat_tokenizer(THINKING)) == Frame("", "")  # chat: false
    assert frame_of(replace(made, chat=False), chat_tokenizer(THINKING)) == Frame("be brief\n", "")


@pytest.mark.parametrize(
    "written,message",
    [
        ("{{ raise_exception('only tools here') }}", "refuses it .only tools here.; use another backbone"),
        ("{{ messages[0].role }}", "does not show the user's message once; use another backbone"),
        ("{{ messages[-1].content * 2 }}", "does not show the user's message once"),
    ],
)
def test_chat_templates_that_cannot_work(written: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^prompt 'own': the tokenizer's chat template {message}") as caught:
        frame_of(chatting(), chat_tokenizer(written))
    assert "\n" not in str(caught.value)


def named(tokenizer: PreTrainedTokenizerFast, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))


def test_responses_end_with_the_turn() -> None:
    for written in (THINKING, ALWAYS_THINKING, PLAIN_TURNS, NO_SYSTEM, DATED):
        base = chat_tokenizer(written, eos="<|endoftext|>")
        assert named(base, end_of_turn(GR2, base)) == "<|im_end|>"
        assert named(base, end_of_turn(template(), base)) == "<|endoftext|>"  # no conversation
    for base in (
        chat_tokenizer(None, "<|endoftext|>"),
        chat_tokenizer("{% for message in messages %}{{ message.content }}\n{% endfor %}", "<|endoftext|>"),
    ):
        assert named(base, end_of_turn(GR2, base)) == "<|endoftext|>"


def test_decoding_stops_where_lessons_end() -> None:
    base = copy.deepcopy(chat_tokenizer(THINKING, eos="<|endoftext|>"))
    with pytest.raises(
        ValueError, match=re.escape("a turn ends with '<|im_end|>', but the tokenizer's EOS is '<|endo")
    ):
        PromptBuilder(chatting(), ITEMS, base, 10_000)
    end_with_turn(chatting(), base)
    assert base.eos_token == "<|im_end|>"
    assert PromptBuilder(chatting(), ITEMS, base, 10_000)
    before = base.get_vocab()
    end_with_turn(template(), base)
    assert (base.eos_token, base.get_vocab()) == ("<|im_end|>", before)


def test_dollars_in_the_system_text() -> None:
    made = chatting()
    priced = replace(made, sections={**made.sections, "system": Template("costs $$5")})
    assert frame_of(priced, None).head == "costs $5\n"
