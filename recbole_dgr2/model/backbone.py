"""The language model behind the re-ranker: any Hugging Face causal LM, or a small one built here.

The only module that builds from transformers. Nothing of a model's code is copied: block diffusion is a 4D
attention mask handed to the stock forward. B rows, T or Q tokens, K keys, M scored slots, V embedding rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from recbole_dgr2.model.bpe import EOS_TOKEN, PAD_TOKEN, train_bpe
from recbole_dgr2.model.forward import TokenScorer, forward_cached, verify_forward
from recbole_dgr2.model.support import refuse_unsupported, require_folder

__all__ = [
    "Backbone",
    "EmbeddedSpec",
    "TokenScorer",
    "add_text_tokens",
    "build_embedded",
    "check_mask_id",
    "forward_cached",
    "grow_rows",
    "hide_progress_bars",
    "load_backbone",
    "read_pretrained",
    "reserve_mask_id",
    "start_mask_row",
    "train_tokenizer",
]

ROW_MULTIPLE = 64


@dataclass(frozen=True)
class Backbone:
    """A causal LM and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def eos_id(self) -> int:
        """Id that ends a response."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """Id that fills batches; may equal `eos_id`, since lengths alone tell what is real."""
        pad = self.tokenizer.pad_token_id
        return self.eos_id if pad is None else int(pad)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def rows(self) -> int:
        """Embedding rows V; may exceed the tokenizer's length."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])


@dataclass(frozen=True)
class EmbeddedSpec:
    """Shape of the model built from scratch; defaults make about half a million parameters."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 320
    vocab_size: int = 1024
    max_positions: int = 1024

    def __post_init__(self) -> None:
        if self.architecture not in ("qwen3", "llama"):
            raise ValueError(f"architecture must be 'qwen3' or 'llama', got {self.architecture!r}")
        for name in ("num_layers", "num_kv_heads", "intermediate_size", "vocab_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        if self.num_heads < 1 or self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )


def train_tokenizer(
    corpus: Iterable[str], vocab_size: int, added_tokens: Sequence[str]
) -> PreTrainedTokenizerFast:
    """Byte-level BPE on `corpus`: any text round-trips exactly, each of `added_tokens` is a single id.

    Pad and EOS are special tokens (0 and 1), added tokens are not: skip_special_tokens keeps them. vocab_size
    counts everything (256 bytes, 2 specials, the added tokens, the merges). Added tokens are cut out of the
    corpus, so merges are learnt on the text between them (`","` between two labels becomes one token).
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(corpus, vocab_size, added_tokens),
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    add_text_tokens(fast, added_tokens)
    return fast


def add_text_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Make each of `tokens` one id that is ordinary text to skip_special_tokens, or raise ValueError."""
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    for token in tokens:
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1 or tokenizer.decode(ids, skip_special_tokens=True) != token:
            raise ValueError(
                f"added token {token!r} is not one id that decodes to itself; choose another spelling"
            )


def build_embedded(spec: EmbeddedSpec, tokenizer: PreTrainedTokenizerBase, seed: int) -> Backbone:
    """A small causal LM from scratch: tied embeddings, SDPA, a spare embedding row for the mask token.

    The same seed gives the same weights and leaves the global random state as it was.
    """
    config_class = {"qwen3": Qwen3Config, "llama": LlamaConfig}[spec.architecture]
    config = config_class(
        vocab_size=_round_up(len(tokenizer) + 1),
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.hidden_size // spec.num_heads,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=spec.max_positions,
        # logits of unit spread at the start; at these widths a third of the loss of 0.02 after 200 steps
        initializer_range=spec.hidden_size**-0.5,
        # a few hundred positions: fast frequencies tell neighbours apart, enough slow ones are left to match content
        rope_parameters={"rope_type": "default", "rope_theta": 2000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return Backbone(model.eval(), tokenizer)


def load_backbone(name_or_path: str | Path, added_tokens: Sequence[str], dtype: str = "float32") -> Backbone:
    """Any causal LM of Hugging Face, by folder or name, with `added_tokens` as single ids.

    Loads safetensors only, runs no code of the checkpoint, attends with SDPA. ValueError, one line, for what
    cannot work: a missing folder, remote code, an encoder-decoder, quantised weights, a sliding window in
    use, logits changed after the head. dtype: "float32", "bfloat16" or "float16".
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or 'float16', got {dtype!r}")
    backbone = read_pretrained(name_or_path, dtype)
    if backbone.tokenizer.eos_token_id is None:
        raise ValueError(
            f"backbone {str(name_or_path)!r}: its tokenizer has no EOS token; set eos_token in its folder"
        )
    try:
        verify_forward(backbone.model)
    except ValueError as error:
        raise ValueError(f"backbone {str(name_or_path)!r}: {error}") from error
    start = _used_rows(backbone.tokenizer)
    add_text_tokens(backbone.tokenizer, added_tokens)
    stop = _used_rows(backbone.tokenizer)
    if stop > start:
        grow_rows(backbone, stop)
        _set_mean_rows(backbone.model, start, stop, noise=0.1)
    return backbone


def read_pretrained(source: str | Path, dtype: str = "auto") -> Backbone:
    """Model and tokenizer of a folder or hub name as they are; every failure is a one-line ValueError."""
    name = str(source)
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    require_folder(name)
    hint = "expected a Hugging Face causal LM: config.json, *.safetensors, tokenizer.json"
    try:
        values, _ = PreTrainedConfig.get_config_dict(name)
        if "auto_map" in values and values.get("model_type") not in CONFIG_MAPPING:
            raise ValueError("it needs code of its own (trust_remote_code), which is never run")
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        refuse_unsupported(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"backbone {name!r} cannot be loaded: {reason} ({hint})") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"backbone {name!r}: its weights lack {len(missing)} tensors such as {missing[0]!r} ({hint})"
        )
    return Backbone(model.eval(), tokenizer)


def hide_progress_bars() -> None:
    """Read and write weights without transformers' bars, which litter a log; bars of downloads stay."""
    downloads = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()


def reserve_mask_id(backbone: Backbone) -> int:
    """First embedding row that no text or added token uses; the embedding grows if there is none.

    No weight is changed (see `start_mask_row`). Call it once, after every token is added.
    """
    used = _used_rows(backbone.tokenizer)
    grow_rows(backbone, used + 1)
    return used


def start_mask_row(backbone: Backbone, mask_id: int) -> None:
    """The mask token's row := mean of the rows before it, to begin training from: a random row costs quality."""
    _set_mean_rows(backbone.model, mask_id, mask_id + 1)


def check_mask_id(backbone: Backbone, mask_id: int) -> None:
    """ValueError unless `mask_id` is an embedding row that no text or added token uses."""
    if not 0 <= mask_id < backbone.rows:
        raise ValueError(f"mask_id {mask_id} is outside the model's {backbone.rows} embedding rows")
    if mask_id < _used_rows(backbone.tokenizer):
        token = backbone.tokenizer.convert_ids_to_tokens(mask_id)
        raise ValueError(
            f"mask_id {mask_id} is used by token {token!r}; add tokens before the mask id is reserved"
        )


def _used_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(max(tokenizer.get_vocab().values()) + 1, len(tokenizer))


def _round_up(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def grow_rows(backbone: Backbone, rows: int) -> None:
    """At least `rows` embedding rows, in multiples of 64; no-op where they are there."""
    if rows > backbone.rows:
        with torch.random.fork_rng(
            devices=[]
        ):  # spare rows are part of the starting weights a stage is resumed by
            torch.manual_seed(rows)
            backbone.model.resize_token_embeddings(_round_up(rows), mean_resizing=False)


@torch.no_grad()
def _set_mean_rows(model: Any, start: int, stop: int, noise: float = 0.0) -> None:
    """Rows [start, stop) of embedding and head := mean of the rows before + `noise` * their spread.

    The same in every run; with no noise new tokens would start out as one and the same.
    """
    generator = torch.Generator().manual_seed(start)
    weights = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    for weight in weights.values():
        known = weight[:start].float()
        drawn = torch.randn(stop - start, weight.shape[1], generator=generator).to(weight.device)
        weight[start:stop] = (known.mean(dim=0) + noise * known.std(dim=0) * drawn).to(weight.dtype)
