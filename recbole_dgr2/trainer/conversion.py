"""Conversion to a block-diffusion LM: a reserved mask token, then conversion fine-tuning (CFT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from recbole_dgr2.data.examples import Batch, Example
from recbole_dgr2.model.backbone import Backbone, reserve_mask_id, start_mask_row
from recbole_dgr2.model.block_diffusion import (
    BlockDiffusionSpec,
    Context,
    ExtendedResponse,
    Layout,
    block_index,
    build_layout,
    extend_to_block,
)
from recbole_dgr2.model.loss import token_weights
from recbole_dgr2.model.noise import NoiseOptions, draw_anchors, draw_masks
from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.scoring import Scored, score_slots
from recbole_dgr2.trainer.stage import Stage


def convert(
    backbone: Backbone, block_size: int, context: Context = "causal"
) -> tuple[Backbone, BlockDiffusionSpec]:
    """Makes a block-diffusion LM of an autoregressive one; every weight is kept.

    Args:
        backbone: the parent; it may grow by unused embedding rows.
        block_size: L.
        context: attention inside finished blocks.

    Returns:
        The backbone and the spec to save with it.
    """
    return backbone, BlockDiffusionSpec(
        block_size=block_size, mask_id=reserve_mask_id(backbone), context=context
    )


class Conversion(Stage[Scored]):
    """CFT: cross-entropy of masked slots on a complementary pair of canvases that share one prefix, `[P | C
    | N1 | N2]`, plus a small autoregressive loss on the clean stream, which trains the seeds (slot 0 of a
    block) and keeps the model usable for autoregressive decoding.

    In "causal" context every response token of the clean stream is scored autoregressively; in "block"
    context only slot 0 of a block, since the others would see themselves. EOS fill after the first EOS has
    labels on the canvases and none in the clean stream.

    Args:
        backbone: converted weights (see `convert`); the mask token's row is set to the mean of all rows.
        options: checked options.
        info_data: see `Stage`.
        spec: the block-diffusion spec that `convert` returned.
        noise: how canvases are drawn.
        ar_weight: weight of the autoregressive loss, >= 0.

    Raises:
        ValueError: a negative `ar_weight`.
    """

    name = "conversion"
    parent = "ar_teacher"

    def __init__(
        self,
        backbone: Backbone,
        options: StageOptions,
        info_data: Mapping[str, Any],
        spec: BlockDiffusionSpec,
        noise: NoiseOptions,
        ar_weight: float,
    ) -> None:
        if not 0 <= ar_weight < float("inf"):
            raise ValueError(f"ar_weight={ar_weight!r}: expected a finite number >= 0")
        start_mask_row(backbone, spec.mask_id)
        super().__init__(backbone, options, info_data)
        self.spec, self.noise = spec, noise
        self.coefficients = {"masked": 1.0, "ar": ar_weight} if ar_weight else {"masked": 1.0}

    def prepare(self, batch: Batch, generators: Sequence[torch.Generator]) -> Scored:
        """Draws anchors and the complementary pair of masks, and lays out `[P | C | N1 | N2]`."""
        size = self.spec.block_size
        anchor = draw_anchors(size, self.noise, generators)
        eos = self.backbone.eos_id
        full = extend_to_block(batch.response, batch.response_length, batch.answer, eos, size, anchor)
        block_of, is_slot0 = block_index(full.response.shape[1], size, anchor)
        masked = draw_masks(full.real, block_of, is_slot0, full.answer, self.noise, generators)
        prompt, response = (batch.prompt, batch.prompt_length), (full.response, full.response_length)
        layout = build_layout(prompt, response, self.spec, masked, anchor)
        return self._scored(layout, full, masked)

    def _scored(self, layout: Layout, full: ExtendedResponse, masked: Tensor) -> Scored:
        """Scores every masked slot of both canvases, and the clean stream where it carries labels."""
        reasoning, answer = self.options.reasoning_weight, self.options.answer_weight
        weights = token_weights(full.answer, full.real, reasoning, answer)
        rows, copies, slots = (masked & (weights > 0)[:, None]).nonzero(as_tuple=True)
        clean = layout.clean_scorable & full.labelled_clean & (weights > 0)
        if "ar" not in self.coefficients:
            clean = torch.zeros_like(clean)
        clean_rows, clean_slots = clean.nonzero(as_tuple=True)
        noisy_weight, clean_weight = weights[rows, slots], weights[clean_rows, clean_slots]
        terms = {"masked": torch.cat([noisy_weight, torch.zeros_like(clean_weight)])}
        if "ar" in self.coefficients:
            terms["ar"] = torch.cat([torch.zeros_like(noisy_weight), clean_weight])
        sources = (layout.source[rows, copies, slots], layout.clean_source[clean_rows, clean_slots])
        targets = (full.response[rows, slots], full.response[clean_rows, clean_slots])
        return Scored(layout, torch.cat([rows, clean_rows]), torch.cat(sources), torch.cat(targets), terms)

    def score(self, model: nn.Module, prepared: Scored) -> dict[str, Tensor]:
        """Returns the sums of `masked` and `ar` and of their accuracies."""
        return score_slots(model, prepared, self.spec.mask_id)

    def length(self, example: Example) -> int:
        """Prompt once, response three times."""
        return len(example.prompt_ids) + 3 * len(example.response_ids)

    def block_diffusion(self) -> BlockDiffusionSpec:
        """The spec that is saved with the weights."""
        return self.spec

    def settings(self) -> dict[str, Any]:
        """Spec, noise and the weight of the autoregressive loss."""
        weight = self.coefficients.get("ar", 0.0)
        return {"spec": self.spec.to_dict(), "noise": asdict(self.noise), "ar_weight": weight}
