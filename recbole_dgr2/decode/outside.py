"""Hugging Face `generate` behind the interface of `decode`: an outside reference for the speed of our own decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from recbole_dgr2.decode.types import Completion, DecodeOptions, DecodeResult, DecodingTrace, Request


@torch.inference_mode()
def generate(
    model: torch.nn.Module, requests: Sequence[Request], options: DecodeOptions, eos_id: int, mask_id: int
) -> DecodeResult:
    """Greedy completions in batches of `options.batch_size`, prompts padded on the left; the mask token suppressed.

    The time of the first token counts as prefill; the trace holds tokens only.
    """
    completions: list[Completion] = []
    prefill, total = 0.0, 0.0
    for begin in range(0, len(requests), options.batch_size):
        part = requests[begin : begin + options.batch_size]
        seconds, _ = _run(model, part, (1, eos_id, mask_id))
        prefill += seconds
        seconds, rows = _run(model, part, (options.max_new_tokens, eos_id, mask_id))
        total += seconds
        for request, tokens in zip(part, rows, strict=True):
            ended = eos_id in tokens
            kept = tokens[: tokens.index(eos_id) + 1] if ended else tokens
            trace = DecodingTrace(kept, (), (), (), 1, options.tau, 0.0)
            completions.append(Completion(request.key, kept, ended, len(kept) - 1, trace))
    return DecodeResult(tuple(completions), prefill, max(total - prefill, 1e-9))


def _run(
    model: torch.nn.Module, part: Sequence[Request], rule: tuple[int, int, int]
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds and new tokens of each row; rule: most new tokens, end token, mask token."""
    limit, eos_id, mask_id = rule
    width = max(len(request.prompt_ids) for request in part)
    ids = torch.full((len(part), width), eos_id)
    for row, request in enumerate(part):
        ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
    lengths = torch.tensor([len(request.prompt_ids) for request in part])
    seen = (torch.arange(width) >= width - lengths[:, None]).long()
    device = next(model.parameters()).device
    begin = time.perf_counter()
    out = model.generate(  # type: ignore[operator]
        ids.to(device),
        attention_mask=seen.to(device),
        max_new_tokens=limit,
        do_sample=False,
        use_cache=True,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
        suppress_tokens=[mask_id],
    )
    rows = [tuple(row) for row in out[:, width:].tolist()]
    return time.perf_counter() - begin, rows
