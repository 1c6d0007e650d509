"""A byte-level BPE vocabulary of the data set's own text, for the model that is built from scratch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|eos|>"
_PIECES = r" ?[\p{L}\p{N}_]+| ?[^\s\p{L}\p{N}_]+|\s+"
"""Merges stay inside a word, digits included ("m7" is one piece), or inside a run of punctuation."""


def train_bpe(corpus: Iterable[str], vocab_size: int, added_tokens: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with pad and EOS first, room left for `added_tokens`, which are not in it yet.

    Added tokens are cut out of the corpus, so that merges are learnt on the text between them.
    """
    least = 256 + 2 + len(added_tokens)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size must be >= {least} (bytes, specials, {len(added_tokens)} added), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added_tokens),
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cut = re.compile(
        "|".join(re.escape(token) for token in sorted(added_tokens, key=len, reverse=True)) or r"(?!)"
    )
    tokenizer.train_from_iterator(
        (part for text in corpus for part in cut.split(text) if part), trainer=trainer
    )
    return tokenizer
