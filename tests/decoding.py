"""Helpers of the decoding tests: requests, comparison of completions, and a scripted stand-in for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from recbole_dgr2.decode import Completion, DecodeOptions, DecodeResult, Request, decode, engine
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from tests.tiny import EOS_ID, MASK_ID, VOCAB, random_tokens, tiny_model

SPEC = BlockDiffusionSpec(block_size=8, mask_id=MASK_ID, context="causal")


def requests_of(lengths: Sequence[int], seed: int = 0) -> list[Request]:
    """Random prompts of the given lengths, keyed 100, 101, ..."""
    prompts = random_tokens(list(lengths), seed)
    return [Request(100 + i, tuple(prompt)) for i, prompt in enumerate(prompts)]


def options_of(
    mode: str = "block", batch_size: int = 4, max_new_tokens: int = 20, **more: Any
) -> DecodeOptions:
    """Short completions; the default tau is low enough that a random model commits several slots in a pass."""
    more.setdefault("tau", 0.06)
    return DecodeOptions(mode, max_new_tokens, batch_size, **more)  # type: ignore[arg-type]


def run(
    requests: Sequence[Request],
    options: DecodeOptions,
    architecture: str = "qwen3",
    spec: BlockDiffusionSpec = SPEC,
    eos_id: int = EOS_ID,
) -> DecodeResult:
    """Decode with the tiny random model of that architecture."""
    return decode(tiny_model(architecture), requests, options, eos_id=eos_id, spec=spec)


def assert_same(got: Sequence[Completion], wanted: Sequence[Completion], tolerance: float = 1e-5) -> None:
    """Equal but for rounding in log-probabilities and confidences."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a.key, a.token_ids, a.finished, a.passes) == (b.key, b.token_ids, b.finished, b.passes)
        assert (a.trace.tokens, a.trace.steps) == (b.trace.tokens, b.trace.steps)
        assert a.trace.log_probs == pytest.approx(b.trace.log_probs, abs=tolerance)
        assert a.trace.confidences == pytest.approx(b.trace.confidences, abs=tolerance)


def script_model(
    monkeypatch: pytest.MonkeyPatch, prompt_length: int, tokens: Sequence[int], strengths: Sequence[float]
) -> None:
    """Make every forward predict tokens[k] with logit strengths[k] (0 elsewhere) for response slot k."""

    def forward(
        model: Any, ids: Tensor, positions: Tensor, allowed: Any, cache: Any, rows: Tensor, cols: Tensor
    ) -> Tensor:
        slots = (positions[rows, cols] + 1 - prompt_length).tolist()
        logits = torch.zeros(len(slots), VOCAB)
        for index, slot in enumerate(slots):
            known = slot < len(tokens)
            logits[index, tokens[slot] if known else 2] = strengths[slot] if known else 0.01
        return logits

    monkeypatch.setattr(engine, "forward_cached", forward)


def watch_forward(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor] | None = None
) -> list[tuple[int, int]]:
    """Record (rows, q) of every forward; optionally change its logits."""
    real = engine.forward_cached
    sizes: list[tuple[int, int]] = []

    def forward(model: Any, ids: Tensor, *rest: Any) -> Tensor:
        sizes.append((ids.shape[0], ids.shape[1]))
        logits = real(model, ids, *rest)
        return logits if change is None else change(logits)

    monkeypatch.setattr(engine, "forward_cached", forward)
    return sizes
