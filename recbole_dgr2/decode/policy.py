"""What a decoding mode is to the engine, and the two things all modes share: choosing tokens and drawing numbers.

The engine owns prompts, cache, offsets and the queue. A policy owns what each row has generated so far: it says what
every live row feeds into the next shared forward and how far its queries see, and reads the logits that come back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from recbole_dgr2.decode.types import Completion, DecodeOptions


@dataclass(frozen=True)
class Plan:
    """Input of one shared forward over n live rows with q query tokens each (int64 arrays); q may differ by pass.

    ids: [n, q] tokens, written at the row's offset on. A row with less to feed is padded on the right with any token.
    visible: [n, q] how many of those q tokens each query sees, besides everything before the offset
        (1, 2, ..., q is causal; q everywhere is bidirectional).
    rows, cols: [M] queries whose logits are wanted.
    """

    ids: np.ndarray
    visible: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


@dataclass(frozen=True)
class Choice:
    """Chosen token, its log-probability, and the top probability, of M slots (arrays [M]).

    entropies: [M], in nats, with rule "entropy" only. labels: [M, N] log-probabilities of `label_ids`, if any.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    confidences: np.ndarray
    entropies: np.ndarray | None = None
    labels: np.ndarray | None = None

    def take(self, index: np.ndarray) -> Choice:
        """The entries that a bool array or slots [m] select."""
        parts = (self.tokens, self.log_probs, self.confidences, self.entropies, self.labels)
        return Choice(*(None if part is None else part[index] for part in parts))  # type: ignore[arg-type]


class Policy(ABC):
    """A decoding mode. Rows are 0..batch-1; the live ones are always the first n."""

    query: int  # most tokens a row feeds into a forward

    def __init__(self, options: DecodeOptions, eos_id: int, mask_id: int | None) -> None:
        self.options = options
        self.eos_id = eos_id
        self.mask_id = mask_id

    @abstractmethod
    def start(self, rows: Sequence[int], keys: Sequence[int], logits: torch.Tensor) -> None:
        """Rows (re)start with requests `keys`; logits [len(rows), V] follow their last prompt token."""

    @abstractmethod
    def plan(self, n: int) -> Plan:
        """Input of the next forward of rows 0..n-1, none of which is done."""

    @abstractmethod
    def update(self, logits: torch.Tensor) -> np.ndarray:
        """Read logits [M, V] of the last plan; give the tokens of it that each row keeps in the cache, int64 [n]."""

    @abstractmethod
    def done(self, row: int) -> bool:
        """The row needs no further pass."""

    @abstractmethod
    def finish(self, row: int) -> Completion:
        """The row's answer."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Row `source` is row `target` from now on."""

    def choose(
        self, logits: torch.Tensor, keys: np.ndarray, positions: np.ndarray, steps: np.ndarray
    ) -> Choice:
        """Greedy or sampled tokens for logits fp32 [M, V] (overwritten); the mask token is never chosen.

        keys, positions (response slot) and steps, int64 [M], name the random number of each slot.
        """
        if self.mask_id is not None:
            logits[:, self.mask_id] = -torch.inf
        temperature = self.options.temperature
        if temperature > 0:
            logits /= temperature
        scores = logits.log_softmax(dim=-1)
        top, tokens = scores.max(dim=-1)
        log_probs = top
        if temperature > 0:
            numbers = torch.from_numpy(uniforms(self.options.seed, keys, positions, steps)).to(logits.device)
            tokens = _sample(scores, numbers, tokens)
            log_probs = scores.gather(1, tokens[:, None])[:, 0]
        entropies = torch.special.entr(scores.exp()).sum(dim=-1) if self.options.rule == "entropy" else None
        labels = scores[:, list(self.options.label_ids)] if self.options.label_ids else None
        return Choice(
            tokens.cpu().numpy(),
            log_probs.cpu().numpy(),
            top.exp().cpu().numpy(),
            None if entropies is None else entropies.cpu().numpy(),
            None if labels is None else labels.cpu().numpy(),
        )


def _sample(scores: torch.Tensor, numbers: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sample of each row of log-probabilities [M, V] at numbers [M] in [0, 1); int64 [M].

    `fallback` [M] stands in where rounding puts the number beyond the last token.
    """
    cdf = scores.double().exp().cumsum(dim=-1)
    tokens = torch.searchsorted(cdf, (numbers * cdf[:, -1])[:, None], right=True)[:, 0]
    return torch.where(tokens < scores.shape[1], tokens, fallback)


def uniforms(seed: int, keys: np.ndarray, positions: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1), float64 [M], each a function of (seed, key, position, step) only.

    A counter-based generator (the finaliser of SplitMix64, Steele et al. 2014, applied once a word), so that a row's
    draws do not depend on which rows it shares a batch with.
    """
    state = np.full(len(keys), seed, dtype=np.uint64)
    for word in (keys, positions, steps):
        state = _mix(state ^ _mix(word.astype(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One SplitMix64 output for each state, uint64 [M]."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
