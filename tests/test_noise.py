"""Noise: what a pair of canvases covers, that the row alone decides it, that shares are as asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.model.block_diffusion import block_index, real_slots
from recbole_dgr2.model.noise import NoiseOptions, draw_anchors, draw_masks
from tests.tiny import row_generators

PLAIN = NoiseOptions(t_min=0.05, all_mask_share=0.0, answer_only_share=0.0, random_anchor=False)


def _draw(
    lengths: list[int],
    size: int,
    options: NoiseOptions,
    keys: list[int],
    answers: list[int] | None = None,
    width: int = 0,
    anchor: list[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """(masks, real, block_of, is_slot0, answer); the last answers[b] tokens of row b are its answer."""
    width = max(width, *lengths)
    real = real_slots(torch.tensor(lengths), width)
    block_of, is_slot0 = block_index(width, size, torch.tensor(anchor or [0] * len(lengths)))
    starts = torch.tensor([n - a for n, a in zip(lengths, answers or [0] * len(lengths), strict=True)])
    answer = real & ~real_slots(starts, width)
    masks = draw_masks(real, block_of, is_slot0, answer, options, row_generators(keys))
    return masks, real, block_of, is_slot0, answer


@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=5),
    size=st.integers(1, 8),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    answer_share=st.sampled_from([0.0, 0.5, 1.0]),
    t_min=st.sampled_from([0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80)
def test_a_pair_masks_each_maskable_token_once(
    lengths: list[int], size: int, share: float, answer_share: float, t_min: float, seed: int
) -> None:
    options = NoiseOptions(t_min, share, answer_share)
    anchor = [(seed + i) % size for i in range(len(lengths))]
    masks, real, block_of, is_slot0, _ = _draw(
        lengths,
        size,
        options,
        [seed + i for i in range(len(lengths))],
        [n // 2 for n in lengths],
        anchor=anchor,
    )
    maskable = real & ~is_slot0
    assert torch.equal(masks.sum(dim=1), maskable.long()), "each token once a pair, slot 0 and padding never"
    for row in range(len(lengths)):
        for block in block_of[row][maskable[row]].unique().tolist():
            assert masks[row, 0, block_of[row] == block].any(), "at least one mask a non-empty block"


def test_by_hand() -> None:
    """Two blocks of three: the same uniforms, read by hand in the documented order, give the same mask."""
    masks, *_ = _draw([6], 3, PLAIN, [11])
    drawn = torch.rand(1 + 4 * 6, generator=torch.Generator().manual_seed(11))[1:].view(4, 6)
    expected = [False] * 6
    for block in (0, 1):
        t = 0.05 + 0.95 * float(drawn[0, block])
        slots = [3 * block + 1, 3 * block + 2]
        for slot in slots:
            expected[slot] = float(drawn[3, slot]) < t
        if not any(expected[slot] for slot in slots):
            expected[min(slots, key=lambda s: float(drawn[3, s]))] = True
    assert masks[0, 0].tolist() == expected


def test_a_row_does_not_depend_on_neighbours_or_padding() -> None:
    options = NoiseOptions()
    lengths, keys = [9, 17, 33], [5, 6, 7]
    together, *_ = _draw(lengths, 4, options, keys, [3, 3, 3])
    for row, (length, key) in enumerate(zip(lengths, keys, strict=True)):
        for width in (0, 50):
            alone, *_ = _draw([length, length], 4, options, [key, 99], [3, 3], width=width)
            assert torch.equal(alone[0, :, :length], together[row, :, :length])
            assert not alone[0, :, length:].any()


def test_same_generator_state_same_noise() -> None:
    first, *_ = _draw([30], 8, NoiseOptions(), [1])
    again, *_ = _draw([30], 8, NoiseOptions(), [1])
    other, *_ = _draw([30], 8, NoiseOptions(), [2])
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_rates() -> None:
    """t ~ U(t_min, 1): the mean rate of copy 0 is (1 + t_min) / 2, but for blocks that were forced."""
    masks, _, _, is_slot0, _ = _draw([320] * 40, 32, PLAIN, list(range(40)))
    rate = float(masks[:, 0].sum() / (~is_slot0).sum())
    assert abs(rate - 0.525) < 0.03
    whole, *_ = _draw([320] * 4, 32, NoiseOptions(1.0, 0.0, 0.0), list(range(4)))
    assert not whole[:, 1].any(), "t_min = 1 masks everything"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_all_mask_share(share: float) -> None:
    """Share of blocks that are whole in copy 0 and empty in copy 1; chance alone gives few at L = 32."""
    masks, _, block_of, _, _ = _draw([320] * 60, 32, NoiseOptions(0.05, share, 0.0), list(range(60)))
    empty = sum(not masks[r, 1, block_of[r] == b].any() for r in range(60) for b in range(10)) / 600
    assert abs(empty - (share + (1 - share) / 31)) < 0.06


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_answer_only_share(share: float) -> None:
    """Rows in which the mixed block (tokens 8..15, answer from 12 on) masks answer tokens only."""
    options = NoiseOptions(0.5, 0.0, share)
    n = 300
    masks, _, block_of, _, answer = _draw([24] * n, 8, options, list(range(n)), [12] * n)
    mixed = block_of == 1
    only = [not masks[r, 0, mixed[r] & ~answer[r]].any() for r in range(n)]
    chance = sum((1 - (0.5 + 0.5 * i / 100)) ** 3 for i in range(100)) / 100
    assert abs(sum(only) / n - (share + (1 - share) * chance)) < 0.09
    if share == 1.0:
        assert all(masks[r, 0, mixed[r] & answer[r]].any() for r in range(n))
        whole = sum(bool(masks[r, 0, block_of[r] == 2][1:].all()) for r in range(n)) / n
        assert abs(whole - (0.5 + 0.5 / 8)) < 0.09, "all answer tokens half of the time, else k at random"
        assert masks[:, 0][block_of == 0].any(), "a block without answer tokens stays ordinary"


def test_an_answer_that_is_only_a_slot0_is_ordinary() -> None:
    masks, *_ = _draw([5], 4, NoiseOptions(0.05, 0.0, 1.0), [3], [1])
    assert masks[0, :, 1:4].any(dim=0).all() and not masks[0, :, 4].any()


def test_anchors() -> None:
    generators = row_generators(list(range(400)))
    anchors = draw_anchors(8, NoiseOptions(), generators)
    assert set(anchors.tolist()) == set(range(8))
    assert torch.equal(anchors[:7], draw_anchors(8, NoiseOptions(), row_generators(list(range(7)))))
    assert draw_anchors(8, PLAIN, row_generators([1, 2])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"t_min": 0.0}, "t_min"),
        ({"t_min": 1.1}, "t_min"),
        ({"all_mask_share": -0.1}, "all_mask_share"),
        ({"answer_only_share": 2.0}, "answer_only_share"),
        ({"t_min": float("nan")}, "t_min"),
    ],
)
def test_bad_options(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NoiseOptions(**values)


def test_generators_must_match_rows() -> None:
    real = torch.ones(2, 4, dtype=torch.bool)
    block_of, is_slot0 = block_index(4, 2, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="2 rows"):
        draw_masks(real, block_of, is_slot0, ~real, PLAIN, row_generators([1]))
