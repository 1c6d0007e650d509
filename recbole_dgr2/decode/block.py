"""Block-parallel decoding with a confidence threshold (Diffusion-GR2, arXiv 2607.01170; shift and seed as trained).

A row's block starts as [seed, mask, ..., mask]. Each denoising pass commits every masked slot whose top probability
reaches tau, and the single best one in any case. A full block gets one commit pass over its clean tokens, whose keys
are kept and whose last logit seeds the next block. The row stops as soon as the end-of-sequence token and every slot
before it are committed (or the token limit is), without finishing the block or a commit pass for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recbole_dgr2.decode.policy import Choice, Plan, Policy
from recbole_dgr2.decode.types import NEVER, Completion, DecodeOptions, DecodingTrace


class Block(Policy):
    """Rows at different blocks, and denoising or committing, share each forward.

    State is kept on the host, [batch, L] for the current block of each row: all of it is small, and one read of the
    chosen tokens a pass is all that crosses from the device.
    """

    def __init__(
        self, options: DecodeOptions, eos_id: int, mask_id: int, block_size: int, causal_context: bool
    ) -> None:
        super().__init__(options, eos_id, mask_id)
        slots, length = options.batch_size, block_size
        self.query = length
        self._mask_id = mask_id
        self._tokens = np.full((slots, length), mask_id, dtype=np.int64)
        self._masked = np.ones((slots, length), dtype=bool)
        self._steps = np.full((slots, length), NEVER, dtype=np.int64)
        self._log_probs = np.zeros((slots, length))
        self._confidences = np.zeros((slots, length))
        self._step = np.zeros(slots, dtype=np.int64)  # denoising passes the current block has had
        self._begin = np.zeros(slots, dtype=np.int64)  # response slot at which the current block begins
        self._keys = np.zeros(slots, dtype=np.int64)
        self._passes = np.zeros(slots, dtype=np.int64)
        self._blocks: list[list[Choice]] = [[] for _ in range(slots)]  # finished blocks
        self._block_steps: list[list[np.ndarray]] = [[] for _ in range(slots)]
        self._denoise_view = np.full((1, length), length, dtype=np.int64)
        self._commit_view = np.arange(1, length + 1)[None] if causal_context else self._denoise_view
        self._committing: np.ndarray = np.zeros(0, dtype=bool)  # rows of the last plan that commit
        self._rows = self._cols = np.zeros(0, dtype=np.int64)  # queries that the last plan scores

    def start(self, rows: Sequence[int], keys: Sequence[int], logits: torch.Tensor) -> None:
        """Each row starts its first block with the prompt's next token as the seed."""
        index = np.asarray(rows)
        for row in rows:
            self._blocks[row], self._block_steps[row] = [], []
        self._keys[index] = keys
        self._begin[index] = 0
        self._passes[index] = 0
        zeros = np.zeros(len(rows), dtype=np.int64)
        self._open(index, self.choose(logits, self._keys[index], zeros, zeros))

    def _open(self, rows: np.ndarray, seeds: Choice) -> None:
        """Begin a block in `rows` [m] with the seeds [m] in slot 0."""
        self._tokens[rows] = self._mask_id
        self._masked[rows] = True
        self._steps[rows] = NEVER
        self._log_probs[rows] = 0.0
        self._confidences[rows] = 0.0
        self._step[rows] = 0
        self._tokens[rows, 0] = seeds.tokens
        self._masked[rows, 0] = False
        self._steps[rows, 0] = 0
        self._log_probs[rows, 0] = seeds.log_probs
        self._confidences[rows, 0] = seeds.confidences

    def plan(self, n: int) -> Plan:
        """The canvases; slot k is scored at query k - 1, the next seed at the last query of a full block."""
        masked = self._masked[:n]
        self._committing = np.logical_not(masked.any(axis=1))
        wanted = np.concatenate((masked[:, 1:], self._committing[:, None]), axis=1)
        self._rows, self._cols = wanted.nonzero()
        visible = np.where(self._committing[:, None], self._commit_view, self._denoise_view)
        return Plan(self._tokens[:n], visible, self._rows, self._cols)

    def update(self, logits: torch.Tensor) -> np.ndarray:
        """Commit slots in the rows that denoise; rows that commit keep their whole block and open the next."""
        rows, cols = self._rows, self._cols
        committing = self._committing
        n = len(committing)
        self._passes[:n] += 1
        self._step[:n] += ~committing
        seeding = committing[rows]
        choice = self.choose(
            logits, self._keys[rows], self._begin[rows] + cols + 1, np.where(seeding, 0, self._step[rows])
        )
        if not committing.all():
            self._commit(rows[~seeding], cols[~seeding] + 1, _take(choice, ~seeding))
        if committing.any():
            full = committing.nonzero()[0]
            self._close(full)
            self._open(full, _take(choice, seeding))
        return np.where(committing, self.query, 0)

    def _commit(self, rows: np.ndarray, slots: np.ndarray, choice: Choice) -> None:
        """Threshold rule over the masked slots (rows, slots) of all rows that denoise; commits at least one a row."""
        confidences = np.full((len(self._committing), self.query), -1.0)
        confidences[rows, slots] = choice.confidences
        best = confidences.argmax(axis=1)  # of equal ones the first
        chosen = (choice.confidences >= self.options.tau) | (slots == best[rows])
        choice = _take(choice, chosen)
        rows, slots = rows[chosen], slots[chosen]
        self._tokens[rows, slots] = choice.tokens
        self._masked[rows, slots] = False
        self._steps[rows, slots] = self._step[rows]
        self._log_probs[rows, slots] = choice.log_probs
        self._confidences[rows, slots] = choice.confidences

    def _close(self, rows: np.ndarray) -> None:
        """Put the full blocks of `rows` behind them."""
        for row in rows.tolist():
            self._store(row)
        self._begin[rows] += self.query

    def _store(self, row: int) -> None:
        self._blocks[row].append(
            Choice(self._tokens[row].copy(), self._log_probs[row].copy(), self._confidences[row].copy())
        )
        self._block_steps[row].append(self._steps[row].copy())

    def _ended(self, row: int) -> tuple[bool, int]:
        """(end-of-sequence token reached, tokens of the current block that count), else (False, 0) to go on."""
        masked = self._masked[row]
        known = int(masked.argmax()) if masked.any() else self.query  # slots before the first masked one
        room = self.options.max_new_tokens - int(self._begin[row])
        ends = np.flatnonzero(self._tokens[row, : min(known, room)] == self.eos_id)
        if len(ends):
            return True, int(ends[0]) + 1
        return False, room if known >= room else 0

    def done(self, row: int) -> bool:
        """The end-of-sequence token, or the token limit, is reached with no masked slot before it."""
        return self._ended(row)[1] > 0

    def finish(self, row: int) -> Completion:
        """The row's tokens, and every slot of its last block as it stands."""
        finished, count = self._ended(row)
        self._store(row)
        blocks = self._blocks[row]
        tokens = tuple(np.concatenate([block.tokens for block in blocks]).tolist())
        trace = DecodingTrace(
            tokens=tokens,
            steps=tuple(np.concatenate(self._block_steps[row]).tolist()),
            log_probs=tuple(np.concatenate([block.log_probs for block in blocks]).tolist()),
            confidences=tuple(np.concatenate([block.confidences for block in blocks]).tolist()),
            block_size=self.query,
            tau=self.options.tau,
            temperature=self.options.temperature,
        )
        end = int(self._begin[row]) + count
        return Completion(int(self._keys[row]), tokens[:end], finished, int(self._passes[row]), trace)

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`."""
        self._blocks[target], self._block_steps[target] = self._blocks[source], self._block_steps[source]
        for state in (
            self._tokens, self._masked, self._steps, self._log_probs, self._confidences,
            self._step, self._begin, self._keys, self._passes,
        ):  # fmt: skip
            state[target] = state[source]


def _take(choice: Choice, index: np.ndarray) -> Choice:
    """The entries of `choice` that the bool array selects."""
    return Choice(choice.tokens[index], choice.log_probs[index], choice.confidences[index])
