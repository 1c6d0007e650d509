"""The slot cache against hand-written buffers and against transformers' own cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from recbole_dgr2.decode.cache import SlotCache
from recbole_dgr2.model.forward import forward_cached
from tests.tiny import ARCHITECTURES, random_tokens, tiny_model

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 3


def states(rows: int, q: int, start: float) -> torch.Tensor:
    """[rows, heads, q, d] of distinct values from `start` on."""
    return start + torch.arange(rows * HEADS * q * WIDTH, dtype=torch.float32).view(rows, HEADS, q, WIDTH)


def test_rows_at_one_offset_append() -> None:
    cache = SlotCache(3, 10, CPU)
    first, second = states(2, 4, 0), states(2, 2, 1000)
    assert cache.write_rows(np.array([0, 0]), 4) == 4
    keys, values = cache.update(first, first + 0.5, 0)
    assert torch.equal(keys, first)
    assert torch.equal(values, first + 0.5)
    assert cache.write_rows(np.array([4, 4]), 2) == 6
    keys, _ = cache.update(second, second, 0)
    assert torch.equal(keys, torch.cat((first, second), dim=2))


def test_rows_at_their_own_offsets() -> None:
    cache = SlotCache(2, 10, CPU)
    cache.write_rows(np.array([0, 0]), 5)
    first = states(2, 5, 0)
    cache.update(first, first, 0)
    assert cache.write_rows(np.array([1, 4]), 3) == 7
    new = states(2, 3, 1000)
    keys, _ = cache.update(new, new, 0)
    assert keys.shape == (2, HEADS, 7, WIDTH)
    assert torch.equal(keys[0, :, 1:4], new[0])
    assert torch.equal(keys[0, :, 4:5], first[0, :, 4:])
    assert torch.equal(keys[1, :, 4:7], new[1])
    assert torch.equal(keys[1, :, :4], first[1, :, :4])


def test_an_offset_left_alone_is_overwritten() -> None:
    cache = SlotCache(1, 10, CPU)
    for start in (0, 500):
        cache.write_rows(np.array([2]), 3)
        keys, _ = cache.update(states(1, 3, start), states(1, 3, start), 0)
    assert torch.equal(keys[:, :, 2:], states(1, 3, 500))


def test_prefix_slots_and_moves() -> None:
    cache = SlotCache(4, 10, CPU)
    cache.write_slots([0], 0, 2)
    prefix = states(1, 2, 0)
    cache.update(prefix, prefix, 0)
    cache.share_prefix(2)
    assert cache.write_slots([3, 1], 2, 3) == 5
    tails = states(2, 3, 1000)
    keys, _ = cache.update(tails, tails, 0)
    assert torch.equal(keys, torch.cat((prefix.expand(2, -1, -1, -1), tails), dim=2))
    cache.move(3, 0, 5)
    cache.write_rows(np.array([5, 5]), 1)
    keys, _ = cache.update(states(2, 1, 9), states(2, 1, 9), 0)
    assert torch.equal(keys[:, :, 2:5], tails)
    assert torch.equal(keys[:, :, :2], prefix.expand(2, -1, -1, -1))


def test_bytes_are_those_of_the_shapes_and_do_not_grow() -> None:
    cache = SlotCache(3, 10, CPU)
    for layer in (0, 1):
        cache.write_rows(np.array([0, 0, 0]), 4)
        cache.update(states(3, 4, 0), states(3, 4, 0), layer)
    assert cache.nbytes == 2 * 2 * 3 * 10 * HEADS * WIDTH * 4
    cache.write_rows(np.array([4, 5, 6]), 4)
    cache.update(states(3, 4, 0), states(3, 4, 0), 1)
    assert cache.nbytes == 2 * 2 * 3 * 10 * HEADS * WIDTH * 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_ragged_rows_score_as_each_row_in_transformers_own_cache(architecture: str) -> None:
    model, lengths, width = tiny_model(architecture), [3, 7, 5], 7
    prompts, more = random_tokens(lengths, 1), random_tokens([2, 2, 2], 2)
    cache = SlotCache(3, 12, CPU)
    cache.write_slots([0, 1, 2], 0, width)
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    rows, positions = torch.arange(3), torch.arange(width).expand(3, width)
    causal = torch.ones(width, width, dtype=torch.bool).tril().expand(3, width, width)
    got = [forward_cached(model, ids, positions, causal, cache, rows, torch.tensor(lengths) - 1)]
    offsets = np.array(lengths)
    for q in (1, 1):
        end = cache.write_rows(offsets, q)
        positions = torch.tensor(offsets)[:, None]
        column = int(offsets[0]) - lengths[0]
        step = torch.tensor(more)[:, column : column + 1]
        allowed = torch.arange(end)[None, None] <= positions[:, :, None]
        got.append(forward_cached(model, step, positions, allowed, cache, rows, torch.zeros_like(rows)))
        offsets += q
    for row, prompt in enumerate(prompts):
        own = DynamicCache(config=model.config)
        for index, piece in enumerate((prompt, more[row][:1], more[row][1:])):
            wanted = model(input_ids=torch.tensor([piece]), cache=own, use_cache=True).logits[0, -1]
            torch.testing.assert_close(got[index][row], wanted, atol=1e-5, rtol=0)
