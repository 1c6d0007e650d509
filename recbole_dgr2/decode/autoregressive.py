"""Autoregressive decoding: one token a row and pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recbole_dgr2.decode.policy import Choice, Plan, Policy
from recbole_dgr2.decode.types import Completion, DecodeOptions, DecodingTrace


class Autoregressive(Policy):
    """Feeds the last token of each row; its logits give the next one."""

    query = 1

    def __init__(self, options: DecodeOptions, eos_id: int, mask_id: int | None) -> None:
        super().__init__(options, eos_id, mask_id)
        slots = options.batch_size
        self._last = np.zeros((slots, 1), dtype=np.int64)
        self._keys = np.zeros(slots, dtype=np.int64)
        self._lengths = np.zeros(slots, dtype=np.int64)
        self._rows = np.arange(slots)
        self._zeros = np.zeros(slots, dtype=np.int64)
        self._ones = np.ones((slots, 1), dtype=np.int64)
        self._slots: list[list[tuple[int, float, float]]] = [[] for _ in range(slots)]
        self._live = 0

    def start(self, rows: Sequence[int], keys: Sequence[int], logits: torch.Tensor) -> None:
        """Each row starts with its first token."""
        index = np.asarray(rows)
        for row in rows:
            self._slots[row] = []
        self._keys[index] = keys
        self._lengths[index] = 0
        zeros = self._zeros[: len(rows)]
        self._append(index, self.choose(logits, self._keys[index], zeros, zeros))

    def plan(self, n: int) -> Plan:
        """One token a row."""
        self._live = n
        return Plan(self._last[:n], self._ones[:n], self._rows[:n], self._zeros[:n])

    def update(self, logits: torch.Tensor) -> np.ndarray:
        """Every row keeps its token."""
        n = self._live
        self._append(self._rows[:n], self.choose(logits, self._keys[:n], self._lengths[:n], self._zeros[:n]))
        return self._ones[:n, 0]

    def _append(self, rows: np.ndarray, choice: Choice) -> None:
        self._last[rows, 0] = choice.tokens
        self._lengths[rows] += 1
        chosen = zip(
            choice.tokens.tolist(), choice.log_probs.tolist(), choice.confidences.tolist(), strict=True
        )
        for row, slot in zip(rows.tolist(), chosen, strict=True):
            self._slots[row].append(slot)

    def done(self, row: int) -> bool:
        """Ends at the end-of-sequence token or at the token limit."""
        slots = self._slots[row]
        return slots[-1][0] == self.eos_id or len(slots) >= self.options.max_new_tokens

    def finish(self, row: int) -> Completion:
        """The row's tokens; every one is a seed (step 0)."""
        tokens, log_probs, confidences = zip(*self._slots[row], strict=True)
        options = self.options
        rule = (1, options.tau, options.temperature)
        trace = DecodingTrace(
            tokens, (0,) * len(tokens), log_probs, confidences, *rule, tuple(range(len(tokens)))
        )
        key = int(self._keys[row])
        return Completion(key, tokens, tokens[-1] == self.eos_id, len(tokens) - 1, trace)

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`."""
        self._slots[target] = self._slots[source]
        for state in (self._last, self._keys, self._lengths):
            state[target] = state[source]
