"""Noise of block-diffusion training: which slots of a response are masked, and where its blocks are anchored.

Every row draws from its own generator, as many numbers as it has tokens: neither neighbours nor padding move
its noise. Complementary masks: Fast-dLLM v2 (arXiv 2509.26328). B rows, R response width, L block length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseOptions:
    """How canvases are drawn.

    t_min: least masking rate, (0, 1]. all_mask_share: share of blocks masked whole. answer_only_share: share
    of rows whose blocks with answer tokens keep their reasoning clean and mask answer tokens only (all of
    them, or a random part, half and half). random_anchor: draw where the first block ends (`draw_anchors`).
    """

    t_min: float = 0.05
    all_mask_share: float = 0.3
    answer_only_share: float = 0.3
    random_anchor: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.t_min <= 1.0:
            raise ValueError(f"t_min must be in (0, 1], got {self.t_min!r}")
        for name in ("all_mask_share", "answer_only_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)!r}")


def draw_anchors(block_size: int, options: NoiseOptions, generators: Sequence[torch.Generator]) -> Tensor:
    """int64 [B]: where the first block of each row ends, uniform in [0, L); 0 unless `random_anchor`.

    generators: one CPU generator a row, so that a row's draw never depends on its neighbours.
    """
    if not options.random_anchor:
        return torch.zeros(len(generators), dtype=torch.long)
    draws = [torch.randint(block_size, (1,), generator=generator) for generator in generators]
    return torch.cat(draws) if draws else torch.zeros(0, dtype=torch.long)


def _row_uniforms(real: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Uniform draws in [0, 1): one a row [B], and four a slot [B, 4, R], each row from its own generator.

    A row draws as many numbers as it has tokens, so neither padding nor neighbours move its noise.
    """
    lengths = real.sum(dim=1).tolist()
    if len(lengths) != len(generators):
        raise ValueError(f"{len(lengths)} rows need as many generators, got {len(generators)}")
    of_row = torch.zeros(len(lengths))
    of_slot = torch.ones(len(lengths), 4, real.shape[1])
    for row, (length, generator) in enumerate(zip(lengths, generators, strict=True)):
        drawn = torch.rand(1 + 4 * length, generator=generator)
        of_row[row] = drawn[0]
        of_slot[row, :, :length] = drawn[1:].view(4, length)
    return of_row, of_slot


def draw_masks(
    real: Tensor,
    block_of: Tensor,
    is_slot0: Tensor,
    answer: Tensor,
    options: NoiseOptions,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """A complementary pair of masks, bool [B, 2, R]: each real slot but slot 0 is masked in exactly one copy.

    real, is_slot0, answer: bool [B, R] (real: a prefix of each row); block_of: int64 [B, R]. Copy 0 of a
    block masks each slot with probability t ~ U(t_min, 1), and at least one. Blocks drawn as all-mask
    (`all_mask_share`) are masked whole in copy 0, empty in copy 1. Rows drawn as answer-only
    (`answer_only_share`): in blocks that hold a maskable answer token, copy 0 masks answer tokens only (half
    of the time all of them, else each with probability t ~ U(0, 1), at least one), so their reasoning is
    clean; their other blocks, which no answer token can see in noisy form, stay ordinary. generators: one CPU
    generator a row; the same generator state always gives the same mask.
    """
    if real.shape[1] == 0:
        return torch.zeros(real.shape[0], 2, 0, dtype=torch.bool, device=real.device)
    of_row, of_slot = (drawn.to(real.device) for drawn in _row_uniforms(real, generators))
    # a block's own numbers are read at the block's index, which never exceeds the index of its first slot
    level, whole, coin = (of_slot[:, i].gather(1, block_of) for i in range(3))
    uniform = of_slot[:, 3]
    maskable = real & ~is_slot0

    def least(eligible: Tensor) -> Tensor:
        """float [B, R]: the least uniform of the slot's block among the eligible, 2 where there is none."""
        start = torch.full_like(uniform, 2.0)
        held = torch.where(eligible, uniform, start)
        return start.scatter_reduce(1, block_of, held, reduce="amin").gather(1, block_of)

    answers = maskable & answer
    answer_block = (of_row < options.answer_only_share)[:, None] & (least(answers) < 2.0)
    eligible = torch.where(answer_block, answers, maskable)
    rate = torch.where(answer_block, level, options.t_min + (1.0 - options.t_min) * level)
    all_masked = torch.where(answer_block, coin < 0.5, whole < options.all_mask_share)
    first = eligible & (all_masked | (uniform < rate) | (uniform == least(eligible)))
    return torch.stack([first, maskable & ~first], dim=1)
