"""Block decoding with a synchronised inner loop, as public code does it: what rows of their own are measured against.

All rows of a batch are in the same block. A row whose block is full waits, fed again for nothing, until the last row's
is; then all commit together. A row that has ended stays to the end of its batch, and no waiting prompt takes its place.
The answers are those of `block`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recbole_dgr2.decode.block import Block
from recbole_dgr2.decode.engine import run_policy
from recbole_dgr2.decode.policy import Plan
from recbole_dgr2.decode.types import Completion, DecodeOptions, DecodeResult, Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec


class Synchronised(Block):
    """One batch, from its first token to the last row's end."""

    def __init__(
        self, options: DecodeOptions, eos_id: int, mask_id: int, block_size: int, causal_context: bool
    ) -> None:
        super().__init__(options, eos_id, mask_id, block_size, causal_context)
        self._answers: dict[int, Completion] = {}
        self._live = 0

    def start(self, rows: Sequence[int], keys: Sequence[int], logits: torch.Tensor) -> None:
        """All rows start at once."""
        self._live = len(rows)
        super().start(rows, keys, logits)
        self._take_answers()

    def plan(self, n: int) -> Plan:
        """As long as one row denoises, full rows are fed and nothing of theirs is read."""
        plan = super().plan(n)
        waiting = self._committing
        if waiting.all():
            return plan
        self._committing = np.zeros_like(waiting)
        read = ~waiting[self._rows]
        self._rows, self._cols = self._rows[read], self._cols[read]
        visible = np.broadcast_to(self._denoise_view, plan.ids.shape)
        return Plan(plan.ids, visible, self._rows, self._cols)

    def update(self, logits: torch.Tensor) -> np.ndarray:
        """Rows that have ended count as full from then on."""
        kept = super().update(logits)
        self._take_answers()
        return kept

    def _take_answers(self) -> None:
        for row in range(self._live):
            if row not in self._answers and super().done(row):
                self._answers[row] = super().finish(row)
        self._masked[list(self._answers)] = False

    def done(self, row: int) -> bool:
        """The whole batch has ended."""
        return len(self._answers) == self._live

    def finish(self, row: int) -> Completion:
        """The answer as it stood when the row ended; `passes` are those until then."""
        return self._answers[row]


def synchronised(
    model: torch.nn.Module,
    requests: Sequence[Request],
    options: DecodeOptions,
    eos_id: int,
    spec: BlockDiffusionSpec,
) -> DecodeResult:
    """What `decode` gives in mode "block", batch by batch."""
    parts = []
    for begin in range(0, len(requests), options.batch_size):
        policy = Synchronised(
            options, eos_id, spec.mask_id, options.block_size or spec.block_size, spec.context == "causal"
        )
        parts.append(run_policy(model, requests[begin : begin + options.batch_size], options, policy))
    return DecodeResult(
        tuple(completion for part in parts for completion in part.completions),
        sum(part.prefill_seconds for part in parts),
        sum(part.decode_seconds for part in parts),
    )
