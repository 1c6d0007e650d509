"""The forward passes: a stock Hugging Face causal LM under a 4D mask, its head only where needed.

No model code is copied: the block-diffusion structure lives in the mask. B rows, T or Q tokens, K keys, M
scored slots, V embedding rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def attention_mask(model: Any, allowed: Tensor) -> Tensor:
    """The 4D mask for allowed, bool [B, Q, K], True = attend: bool for SDPA, additive for eager.

    A bool mask is silently wrong in eager attention (it is added); any other implementation is refused
    (ValueError).
    """
    implementation = model.config._attn_implementation
    if implementation == "sdpa":
        return allowed[:, None]
    if implementation == "eager":
        dtype = model.get_input_embeddings().weight.dtype
        blocked = torch.finfo(dtype).min
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, blocked)[
            :, None
        ]
    raise ValueError(
        f"attention {implementation!r} takes no 4D mask; load the model with 'sdpa' (or 'eager')"
    )


def _plain(model: Any) -> Any:
    """The transformers model inside adapters (peft edits its layers in place)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def bidirectional(model: Any) -> Iterator[None]:
    """A call without a mask inside lets every query attend every key; Llama reads `config.is_causal` for that.

    Around many passes it spares each of them the change of the config, which is slow (its attributes are checked).
    """
    config = _plain(model).config
    before = getattr(config, "is_causal", None)
    if before is False:
        yield
        return
    config.is_causal = False
    try:
        yield
    finally:
        if before is None:
            del config.is_causal
        else:
            config.is_causal = before


@contextlib.contextmanager
def recomputed(model: Any, enabled: bool) -> Iterator[None]:
    """In training mode, layers inside keep their inputs only and are computed again in the backward pass."""
    if not enabled:
        yield
        return
    plain = _plain(model)
    # transformers 5.24 renamed it
    kind = "activation" if hasattr(plain, "activation_checkpointing_enable") else "gradient"
    getattr(plain, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(plain, f"{kind}_checkpointing_disable")()


def compile_passes(model: Any) -> None:
    """Compile the transformer's forward for all passes from now on (torch.compile, shapes dynamic).

    Every mode gains or loses by it alike: it takes the interpreter out of a pass, which is most of a pass of a small
    model at batch 1. The first passes take a minute; later ones of any length reuse what was compiled.
    """
    inner = _plain(model).base_model
    inner.forward = torch.compile(inner.forward, dynamic=True)


@lru_cache(maxsize=8)
def _cache_argument(model_class: type[Any]) -> str:
    """transformers 5.24 renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


def _hidden(plain: Any, ids: Tensor, positions: Tensor, allowed: Tensor | None, cache: Any) -> Tensor:
    """Last hidden states [B, Q, H]; keys and values go to `cache` where one is given."""
    inner = plain.base_model
    kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": cache is not None}
    if cache is not None:
        kwargs[_cache_argument(inner.__class__)] = cache
    if allowed is not None:
        return inner(attention_mask=attention_mask(plain, allowed), **kwargs).last_hidden_state
    with bidirectional(plain):
        return inner(attention_mask=None, is_causal=False, **kwargs).last_hidden_state


def _score(plain: Any, hidden: Tensor, *scored: Tensor) -> Tensor:
    return plain.get_output_embeddings()(hidden[scored]).float()


CHUNK = 2**22
"""Elements of a chunk of logits that `TokenScorer` reads at a time: 16 MiB of float32, five times that at work."""

Read = Callable[[Tensor, int], Tensor]
"""From logits [m, V] of the slots from the given one on: what a loss needs of each, [m, ...]."""


class TokenScorer(nn.Module):
    """One forward for everything a loss needs, so that accelerate and DDP see a single module call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        allowed: Tensor,
        rows: Tensor,
        cols: Tensor,
        read: Read | None = None,
    ) -> Tensor:
        """float32 logits [M, V] at the slots (rows[m], cols[m]); the LM head runs nowhere else.

        With `read`, what it makes of them instead, [M, ...]: head and `read` work through the slots in chunks of at
        most `CHUNK` logits (but at least one slot), computed again in the backward pass, so that no memory grows with
        M * V. Values and gradients are those of all slots at once.

        ids, positions: int64 [B, T]; allowed: bool [B, T, T]; rows, cols: int64 [M], into B and T.
        """
        plain = _plain(self.model)
        hidden = _hidden(plain, ids, positions, allowed, None)[rows, cols]
        head = plain.get_output_embeddings()
        if read is None:
            return head(hidden).float()
        size = max(1, CHUNK // plain.get_input_embeddings().num_embeddings)
        if len(hidden) <= size:
            return read(head(hidden).float(), 0)

        def values(part: Tensor, start: int) -> Tensor:
            return read(head(part).float(), start)

        # nothing random in a chunk: no state of the generators has to be kept for the second computation
        return torch.cat(
            [
                checkpoint(values, part, size * number, use_reentrant=False, preserve_rng_state=False)
                for number, part in enumerate(hidden.split(size))
            ]
        )


def forward_cached(
    model: Any, ids: Tensor, positions: Tensor, allowed: Tensor | None, cache: Any, *scored: Tensor
) -> Tensor:
    """float32 logits [M, V] of new tokens against a key-value cache, which decides what is kept.

    ids, positions: int64 [B, Q]. allowed: bool [B, Q, K] over the K keys the cache returns (cached and new),
    True = attend; None: no mask, every query attends every returned key (a single token, or a block whose
    rows are aligned), which lets SDPA take its fastest kernel. scored: the indices of the M scored slots, as
    for indexing: rows, then cols, int64 [M] into B and Q.
    """
    plain = _plain(model)
    return _score(plain, _hidden(plain, ids, positions, allowed, cache), *scored)


def without_mask_id(logits: Tensor, mask_id: int | None) -> Tensor:
    """Copy of logits [..., V] with the mask token at minus infinity: it is never decoded or scored."""
    if mask_id is None:
        return logits
    logits = logits.clone()
    logits[..., mask_id] = -torch.inf
    return logits


@torch.no_grad()
def verify_forward(model: Any) -> None:
    """Prove on a probe that the passes above compute what the model does; ValueError if not.

    Refused: logits that are more than head(hidden), a model that is not causal, one that ignores mask or
    positions.
    """
    plain = _plain(model)
    weight = plain.get_input_embeddings().weight
    ids = torch.arange(8, device=weight.device)[None] % len(weight)
    positions = torch.arange(8, device=weight.device)[None]
    full = torch.ones(1, 8, 8, dtype=torch.bool, device=weight.device)
    rows, cols = torch.zeros_like(positions[0]), positions[0]
    try:
        logits = plain(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
        hidden = plain.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        causal, both = (_hidden(plain, ids, positions, mask, None) for mask in (full.tril(), full))
        spread = _hidden(plain, ids, 2 * positions, full.tril(), None)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it takes no ids, positions and mask as other causal LMs do ({error})") from error
    unit = torch.finfo(weight.dtype).eps
    if float((_score(plain, hidden, rows, cols) - logits).abs().max()) > 8 * unit * float(logits.abs().max()):
        raise ValueError(
            "its logits are not just the head on the last hidden state (scaling, capping, more layers)"
        )
    tolerance = 1e-3 if unit < 1e-6 else 0.1
    if float((_score(plain, causal, rows, cols) - logits).norm()) > tolerance * float(logits.norm()):
        raise ValueError("it is not causal: under a causal mask it gives other logits")
    if torch.equal(both[0, 0], causal[0, 0]):
        raise ValueError("it ignores the attention mask: block diffusion needs softmax attention")
    if torch.equal(spread, causal):
        raise ValueError(
            "it ignores position ids: a noisy copy could not take the positions of the clean one"
        )
