"""Key-value cache of fixed buffers in which every row (slot) has its own offset.

A row that denoises writes its canvas at its offset and leaves the offset alone, so the next pass overwrites it and
nothing is ever cropped; a row that commits advances its offset. Rows at different places therefore share a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class _Window:
    """Where the next forward writes its keys and what it reads back.

    rows: live rows 0..rows-1 take part, or None for the rows in `slots` [m].
    start: first position written when it is the same for all rows, else None; end: one past the last position read.
    flat: int64 [rows * q] places in the buffer seen as [slots * length, heads, d], for rows at different offsets.
    """

    rows: int
    start: int | None
    end: int
    slots: torch.Tensor | None = None
    flat: torch.Tensor | None = None


class SlotCache(Cache):
    """Buffers of [slots, length, heads, d] a layer, made at the first update (shapes and dtype come from the model).

    Call `write_rows` or `write_slots` before each forward. Keys go back to the model as [rows, heads, end, d], a view
    of the buffer; what a row may not see of it is for the attention mask to hide.
    """

    is_compileable = False  # the base class derives it from its layers, of which there are none

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.length = length
        self.device = device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._window = _Window(rows=0, start=0, end=0)

    @property
    def nbytes(self) -> int:
        """Memory of all buffers: 2 * layers * slots * length * heads * d * element size."""
        return sum(buffer.numel() * buffer.element_size() for buffer in [*self.keys, *self.values])

    def write_rows(self, offsets: np.ndarray, q: int) -> int:
        """The next forward runs rows 0..n-1, row r writes q tokens at offsets[r] (int64 [n]).

        Returns the number of positions the forward reads, max(offsets) + q.
        """
        low, high = int(offsets.min()), int(offsets.max())
        end = high + q
        if low == high:
            self._window = _Window(rows=len(offsets), start=low, end=end)
            return end
        starts = offsets + np.arange(len(offsets)) * self.length
        flat = torch.from_numpy((starts[:, None] + np.arange(q)).reshape(-1)).to(self.device)
        self._window = _Window(rows=len(offsets), start=None, end=end, flat=flat)
        return end

    def write_slots(self, slots: Sequence[int], start: int, q: int) -> int:
        """The next forward prefills the given slots: q tokens each at `start`, after a prefix that all slots share.

        Returns the number of positions the forward reads, start + q.
        """
        index = torch.tensor(slots, device=self.device)
        self._window = _Window(rows=len(slots), start=start, end=start + q, slots=index)
        return start + q

    def share_prefix(self, length: int) -> None:
        """Copy the first `length` positions of slot 0 to every other slot."""
        for buffer in [*self.keys, *self.values]:
            buffer[1:, :length] = buffer[:1, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over slot `target`."""
        for buffer in [*self.keys, *self.values]:
            buffer[target, :length] = buffer[source, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, heads, q, d] of one layer; give back what its queries read, [rows, heads, end, d]."""
        if layer_idx == len(self.keys):
            shape = (self.slots, self.length, key_states.shape[1], key_states.shape[3])
            # zeros, not empty: a masked position still enters the product 0 * value, which must not be NaN
            self.keys.append(key_states.new_zeros(shape))
            self.values.append(value_states.new_zeros((*shape[:3], value_states.shape[3])))
        return (
            self._write(self.keys[layer_idx], key_states),
            self._write(self.values[layer_idx], value_states),
        )

    def _write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        window, new = self._window, states.transpose(1, 2)
        if window.slots is not None:
            assert window.start is not None
            buffer[window.slots, window.start : window.end] = new
            if window.start == 0:
                return states
            prefix = buffer[:1, : window.start].expand(window.rows, -1, -1, -1)
            return torch.cat((prefix, new), dim=1).transpose(1, 2)
        if window.start is not None:
            buffer[: window.rows, window.start : window.end] = new
        else:
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, window.flat, new.reshape(-1, *new.shape[2:]))
        return buffer[: window.rows, : window.end].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Position of the next forward's first token (asked only where no mask is passed, so all rows agree)."""
        return self._window.start or 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys the next forward reads, and the position of the first of them."""
        return self._window.end, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Positions a slot holds."""
        return self.length
