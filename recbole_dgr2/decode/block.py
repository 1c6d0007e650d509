"""Block-parallel decoding (Diffusion-GR2, arXiv 2607.01170; shift and seed as trained).

A row's block starts as [seed, mask, ..., mask]. Each denoising pass commits the slots that a rule of `commit` picks: by
default every masked slot whose top probability reaches tau, and the single best one in any case. A full block gets one
commit pass over its clean tokens, whose keys are kept and whose last logit seeds the next block. The row stops as soon
as the end-of-sequence token and every slot before it are committed (or the token limit is), without finishing the block
or a commit pass for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recbole_dgr2.decode.assignment import assign_labels
from recbole_dgr2.decode.commit import commit_set
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
        self._at_pass = np.full(
            (slots, length), NEVER, dtype=np.int64
        )  # pass of the row that committed the slot
        self._labels = np.zeros((slots, length, len(options.label_ids)))  # log-probabilities of the labels
        self._step = np.zeros(slots, dtype=np.int64)  # denoising passes the current block has had
        self._begin = np.zeros(slots, dtype=np.int64)  # response slot at which the current block begins
        self._keys = np.zeros(slots, dtype=np.int64)
        self._passes = np.zeros(slots, dtype=np.int64)
        self._blocks: list[list[dict[str, np.ndarray]]] = [
            [] for _ in range(slots)
        ]  # of started blocks, slot by slot
        self._denoise_view = np.full((1, length), length, dtype=np.int64)
        self._commit_view = np.arange(1, length + 1)[None] if causal_context else self._denoise_view
        self._committing: np.ndarray = np.zeros(0, dtype=bool)  # rows of the last plan that commit
        self._rows = self._cols = np.zeros(0, dtype=np.int64)  # queries that the last plan scores

    def start(self, rows: Sequence[int], keys: Sequence[int], logits: torch.Tensor) -> None:
        """Each row starts its first block with the prompt's next token as the seed."""
        index = np.asarray(rows)
        for row in rows:
            self._blocks[row] = []
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
        self._at_pass[rows] = NEVER
        self._step[rows] = 0
        self._put(rows, np.zeros(len(rows), dtype=np.int64), seeds)

    def _put(self, rows: np.ndarray, slots: np.ndarray, choice: Choice) -> None:
        """Commit `choice` [m] to the slots (rows [m], slots [m]) at the current step and pass of their rows."""
        self._tokens[rows, slots] = choice.tokens
        self._masked[rows, slots] = False
        self._steps[rows, slots] = self._step[rows]
        self._at_pass[rows, slots] = self._passes[rows]
        self._log_probs[rows, slots] = choice.log_probs
        self._confidences[rows, slots] = choice.confidences
        if choice.labels is not None:
            self._labels[rows, slots] = choice.labels

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
            self._commit(rows[~seeding], cols[~seeding] + 1, choice.take(~seeding))
        if committing.any():
            full = committing.nonzero()[0]
            self._close(full)
            self._open(full, choice.take(seeding))
        return np.where(committing, self.query, 0)

    def _commit(self, rows: np.ndarray, slots: np.ndarray, choice: Choice) -> None:
        """Commit by the rule among the masked slots (rows, slots) of all rows that denoise, at least one a row."""
        shape, options = (len(self._committing), self.query), self.options
        confidences, entropies = np.full(shape, -1.0), None
        confidences[rows, slots] = choice.confidences
        if choice.entropies is not None:
            entropies = np.full(shape, np.inf)
            entropies[rows, slots] = choice.entropies
        value = options.tau if options.rule_value is None else options.rule_value
        chosen = commit_set(options.rule, value, confidences, entropies)[rows, slots]
        self._put(rows[chosen], slots[chosen], choice.take(chosen))

    def _close(self, rows: np.ndarray) -> None:
        """Put the full blocks of `rows` behind them."""
        for row in rows.tolist():
            self._store(row)
        self._begin[rows] += self.query

    def _store(self, row: int) -> None:
        parts = {
            "tokens": self._tokens,
            "steps": self._steps,
            "log_probs": self._log_probs,
            "confidences": self._confidences,
            "passes": self._at_pass,
            "labels": self._labels,
        }
        self._blocks[row].append({name: part[row].copy() for name, part in parts.items()})

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
        parts = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        labels = parts.pop("labels")
        trace = DecodingTrace(
            **{name: tuple(part.tolist()) for name, part in parts.items()},
            block_size=self.query,
            tau=self.options.tau,
            temperature=self.options.temperature,
        )
        tokens = trace.tokens[: int(self._begin[row]) + count]
        if self.options.label_ids:
            tokens = assign_labels(tokens, self.options.label_ids, labels)
        return Completion(int(self._keys[row]), tokens, finished, int(self._passes[row]), trace)

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`."""
        self._blocks[target] = self._blocks[source]
        for state in (
            self._tokens, self._masked, self._steps, self._log_probs, self._confidences, self._at_pass, self._labels,
            self._step, self._begin, self._keys, self._passes,
        ):  # fmt: skip
            state[target] = state[source]
