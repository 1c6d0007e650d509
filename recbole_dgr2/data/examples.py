"""Training examples and their padded batches; lengths are kept, never read off the padding id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import BoolTensor, LongTensor


@dataclass(frozen=True)
class Example:
    """One prompt with the response to learn.

    Args:
        key: identifies the example for ever; random numbers are keyed by it. Not negative.
        prompt_ids: token ids of the prompt, at least one.
        response_ids: token ids of the response, at least one; the last one is EOS unless the response was
            truncated.
        answer_start: index into `response_ids` where the ranked list begins; all tokens before it are
            reasoning.

    Raises:
        ValueError: an empty prompt or response, a negative key, or `answer_start` outside the response.
    """

    key: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    answer_start: int

    def __post_init__(self) -> None:
        if self.key < 0:
            raise ValueError(f"example key {self.key}: expected a number >= 0")
        if not self.prompt_ids or not self.response_ids:
            empty = "response" if self.prompt_ids else "prompt"
            raise ValueError(f"example {self.key}: the {empty} has no tokens, expected at least one")
        if not 0 <= self.answer_start <= len(self.response_ids):
            raise ValueError(
                f"example {self.key}: answer_start {self.answer_start}, expected 0..{len(self.response_ids)}"
            )


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right, prompts and responses apart.

    Shapes: keys [B], prompt [B, P], prompt_length [B], response [B, R], response_length [B] (int64) and
        answer [B, R]
    (bool: True at answer tokens; False at reasoning tokens and at padding).
    """

    keys: LongTensor
    prompt: LongTensor
    prompt_length: LongTensor
    response: LongTensor
    response_length: LongTensor
    answer: BoolTensor

    def to(self, device: torch.device | str) -> Batch:
        """Returns the same batch on `device`."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Pads examples to one batch.

    Args:
        examples: B examples.
        pad_id: id written into the padding; it may be a real token's id (EOS), nothing reads it back.

    Raises:
        ValueError: no example was given.
    """
    if not examples:
        raise ValueError("a batch needs at least one example, got none")
    prompt, prompt_length = _pad([example.prompt_ids for example in examples], pad_id)
    response, response_length = _pad([example.response_ids for example in examples], pad_id)
    start = np.array([example.answer_start for example in examples])
    slots = np.arange(response.shape[1])
    answer = (slots >= start[:, None]) & (slots < response_length[:, None])
    keys = np.array([example.key for example in examples], dtype=np.int64)
    arrays = (keys, prompt, prompt_length, response, response_length, answer)
    return Batch(*(torch.from_numpy(array) for array in arrays))  # type: ignore[arg-type]


def _pad(rows: Sequence[tuple[int, ...]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [B, longest] filled up with `pad_id`, and the lengths [B], both int64."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.full((len(rows), int(lengths.max())), pad_id, dtype=np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate([np.asarray(row) for row in rows])
    return ids, lengths
