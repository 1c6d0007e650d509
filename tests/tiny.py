"""Tiny random models and tokenizers for tests, built in milliseconds, no network."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recbole_dgr2.model.backbone import Backbone, EmbeddedSpec, build_embedded, train_tokenizer

ARCHITECTURES = ("qwen3", "llama")
LABELS = tuple(f"<c{i}>" for i in range(1, 11))
VOCAB = 96
MASK_ID = 90
EOS_ID = 1
CORPUS = (
    "user liked: Toy Story; Heat; Casino\n",
    "the buyer of red nail polish often takes a base coat next",
    '["<c3>","<c7>","<c1>"]',
) * 8


def tiny_model(
    architecture: str = "qwen3", seed: int = 0, vocab_size: int = VOCAB, attention: str = "sdpa"
) -> PreTrainedModel:
    """Random fp32 model in eval mode: hidden 32, 2 layers, 4 heads on 2 key-value heads, untied.

    Its weights are large enough that logits differ visibly between tokens and contexts.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[architecture](
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 ids with ten candidate labels; shared, so do not add tokens to it."""
    return train_tokenizer(CORPUS, vocab_size=320, added_tokens=LABELS)


def tiny_backbone(architecture: str = "qwen3", seed: int = 0) -> Backbone:
    """Model and tokenizer that fit together (384 rows, mask row spare): hidden 32, 2 layers, 4 heads on 2."""
    spec = EmbeddedSpec(
        architecture=architecture,  # type: ignore[arg-type]
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=64,
        max_positions=512,
    )
    return build_embedded(spec, tiny_tokenizer(), seed)


def random_tokens(lengths: list[int], seed: int = 0, low: int = 2, high: int = 80) -> list[list[int]]:
    """Random ids in [low, high): below MASK_ID, never pad or EOS."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]], pad: int = 0, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids int64 [B, max(width, longest)] and lengths int64 [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), max(width, int(lengths.max()))), pad)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return ids, lengths


def row_generators(keys: list[int]) -> list[torch.Generator]:
    """One CPU generator a row, keyed by the row."""
    return [torch.Generator().manual_seed(key) for key in keys]
