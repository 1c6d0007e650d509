"""What stands around a prompt: the conversation form of the tokenizer, or nothing.

The frame of a conversation does not depend on the user's message, so it is taken once from the tokenizer's own chat
template; the message goes between its two parts. A trace with a thinking tag of its own is asked for in thinking mode,
and a tag that the chat template would open is left to the trace, so that there is always one. Dates that some chat
templates show are fixed, since a prompt must be the same every day.

A tokenizer without a chat template (the one of the embedded model, those of some base models) gets the plain form: the
system text on a line of its own, then the message and a line end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from recbole_dgr2.data.template import PromptTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MESSAGE, _RESPONSE = "the message of the user goes here", "the response goes here"
_THOUGHT = re.compile(r"<think>\s*(?P<closed></think>\s*)?\Z")
_FIXED_DATE = "{%- macro strftime_now(format) -%}1 January 2025{%- endmacro -%}"


@dataclass(frozen=True)
class Frame:
    """Text before and after the user's message; the response follows at once."""

    head: str
    tail: str


def frame_of(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase | None) -> Frame:
    """The frame of a template's prompts; without a tokenizer, or without a chat template in it, the plain one.

    Raises:
        ValueError: the chat template cannot render the messages, or wants thoughts that the trace does not have.
    """
    system = template.fill("system")
    if tokenizer is None or not _converses(template, tokenizer):
        return Frame(f"{system}\n" if system else "", "\n" if template.chat else "")
    text = _conversation(template, tokenizer, system)
    head, found, tail = text.partition(_MESSAGE)
    if not found or _MESSAGE in tail:
        raise ValueError(
            f"prompt {template.name!r}: the tokenizer's chat template does not show the user's message once; "
            "use another backbone, or a prompt with chat: false"
        )
    thought = _THOUGHT.search(tail)
    if thought and template.thinks:
        return Frame(head, tail[: thought.start()])
    if thought and not thought["closed"]:
        raise ValueError(
            f"prompt {template.name!r}: the tokenizer's chat template opens <think>, so the section 'pattern' must "
            "begin with <think> and the section 'answer' close it"
        )
    return Frame(head, tail)


def end_of_turn(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token that ends a response: the chat template's end of a turn, else EOS."""
    end = int(tokenizer.eos_token_id)
    if not _converses(template, tokenizer):
        return end
    messages = [{"role": "user", "content": _MESSAGE}, {"role": "assistant", "content": _RESPONSE}]
    rest = _apply(tokenizer, messages, False, template.thinks).rpartition(_RESPONSE)[2].lstrip()
    first = tokenizer(rest, add_special_tokens=False)["input_ids"][:1]
    return int(first[0]) if first and first[0] in tokenizer.get_added_vocab().values() else end


def end_with_turn(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the end of a turn the tokenizer's EOS, by which decoding stops: base models have another one."""
    tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(end_of_turn(template, tokenizer)))


def _converses(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase) -> bool:
    return template.chat and tokenizer.chat_template is not None


def _conversation(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, system: str) -> str:
    """System text and message as the tokenizer writes them; where it knows no system role, in one message."""
    user = {"role": "user", "content": _MESSAGE}
    merged = [{"role": "user", "content": f"{system}\n\n{_MESSAGE}"}]
    attempts = [[{"role": "system", "content": system}, user], merged] if system else [[user]]
    for messages in attempts:
        try:
            return _apply(tokenizer, messages, True, template.thinks)
        except TemplateError as error:
            reason = " ".join(str(error).split())
    raise ValueError(
        f"prompt {template.name!r}: the tokenizer's chat template refuses it ({reason}); use another backbone, or a "
        "prompt with chat: false"
    )


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], respond: bool, thinks: bool
) -> str:
    written = tokenizer.get_chat_template()
    if "strftime_now" in written:
        written = _FIXED_DATE + written
    return str(
        tokenizer.apply_chat_template(
            messages,
            chat_template=written,
            tokenize=False,
            add_generation_prompt=respond,
            enable_thinking=thinks,
        )
    )
