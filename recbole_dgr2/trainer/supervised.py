"""Supervised stages on plain examples: likelihood of reasoning and answer tokens, weighted apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recbole_dgr2.data.examples import Batch
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec, build_layout
from recbole_dgr2.model.loss import token_weights
from recbole_dgr2.trainer.scoring import Scored, score_slots
from recbole_dgr2.trainer.stage import Stage

# no noisy copy is laid out, so the mask id is never written; in causal context the block size decides nothing
_PLAIN = BlockDiffusionSpec(block_size=1, mask_id=0, context="causal")


class Supervised(Stage[Scored]):
    """`-w_r * sum log p(reasoning) - w_a * sum log p(answer)`, over response tokens only, divided by the sum of
    weights.
    """

    coefficients = {"nll": 1.0}

    def prepare(self, batch: Batch, generators: Sequence[torch.Generator]) -> Scored:
        """Lays out `[P | C]`; every response token with a weight is scored at the token before it."""
        prompt, response = (batch.prompt, batch.prompt_length), (batch.response, batch.response_length)
        layout = build_layout(prompt, response, _PLAIN)
        reasoning, answer = self.options.reasoning_weight, self.options.answer_weight
        weights = token_weights(batch.answer, layout.real, reasoning, answer)
        rows, slots = (weights > 0).nonzero(as_tuple=True)
        return Scored(
            layout=layout,
            rows=rows,
            cols=layout.clean_source[rows, slots],
            targets=batch.response[rows, slots],
            terms={"nll": weights[rows, slots]},
        )

    def score(self, model: nn.Module, prepared: Scored) -> dict[str, Tensor]:
        """Returns the sums of `nll` and `nll_accuracy`."""
        return score_slots(model, prepared, mask_id=None)
