"""Tokenizers with chat templates of several families, built in milliseconds, no network."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from recbole_dgr2.data.prompt import label
from recbole_dgr2.model.backbone import add_text_tokens, train_tokenizer

SIDS = {item: f"<a_{item % 3}><b_{item}>" for item in range(1, 6)}
"""Semantic IDs of items 1 to 5."""
SID_TOKENS = tuple(dict.fromkeys(token + ">" for sid in SIDS.values() for token in sid.split(">")[:-1]))
LABELS = tuple(label(slot) for slot in range(10))

_TURNS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
)
THINKING = _TURNS + (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""As Qwen3: thinking can be turned off, which closes an empty thought."""
ALWAYS_THINKING = _TURNS + "{{ '<think>\\n' }}{%- endif %}"
"""As Qwen3-Thinking: every response begins inside a thought."""
PLAIN_TURNS = _TURNS + "{%- endif %}"
"""As SmolLM2: no thoughts."""
NO_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}"
) + PLAIN_TURNS
"""As Gemma: no system role."""
DATED = "{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\\n' }}" + PLAIN_TURNS
"""As Llama 3 and SmolLM3: the day is in every prompt."""

QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Qwen's rule for words: an end of line sticks to the punctuation before it."""


@cache
def chat_tokenizer(written: str | None = THINKING, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A tokenizer like Qwen3's, with this chat template; shared, so do not change it.

    Turns end with <|im_end|>, <think> is a single token of ordinary text, candidate labels and semantic IDs are added.
    """
    tokenizer = train_tokenizer(["- red lamp | home, light\nretriever score 3\n"] * 4, 420, LABELS)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>"]}
    )
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>", "<tool_call>")])
    add_text_tokens(tokenizer, SID_TOKENS)
    tokenizer.eos_token = eos
    tokenizer.chat_template = written
    return tokenizer
