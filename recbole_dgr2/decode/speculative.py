"""Speculative decoding: blocks are drafted by denoising and verified by the causal stream; the output is exactly AR.

A forward of a row holds two parts, [verified | canvas]. The first, causal, is the row's newest token and the drafts
after it: its logits are those of autoregressive decoding, so drafts stand as long as they are the tokens chosen there,
and the token chosen after them comes on top. Keys of what stands are kept. The second, the canvas, is the last draft
under verification and masks; bidirectional, it drafts the next block while this one is still being verified. A pass
that only drafts is needed at the start of a row; its canvas begins with the newest token itself.

What a pass has found out is never thrown away:
- when a draft falls, those behind it are verified next all the same, for in worded text most of them survive; when the
  first of them falls at once, the text has moved under them (a longer word, say) and they are dropped;
- they are first replaced by what the causal stream chose behind them in the same pass (Jacobi decoding, arXiv
  2305.10427), which knows more than the canvas did;
- a draft of confidence >= tau beyond those under verification is shown to the next canvas instead of a mask, so that
  drafting is denoising in several passes, at no cost in passes;
- while enough of the drafts behind those under verification are expected to stand, no canvas is fed at all.

How many drafts a pass verifies follows from their confidences: one more as long as its chance to stand is worth its
share of the pass. Relatives: TiDAR (arXiv 2511.08923, drafting and verification in one pass), S2D2 (verification by
the same weights), speculative decoding (arXiv 2211.17192).

Samples (temperature above 0) are coupled: draft and verification draw with the same random number, keyed by request
and position, and so does autoregressive decoding. The token chosen at verification is therefore the one that
autoregressive decoding would sample, whatever was drafted: not only its distribution is exact, the sample is the same
(drafter-invariant speculation, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from recbole_dgr2.decode.policy import Choice, Plan, Policy
from recbole_dgr2.decode.types import Completion, DecodeOptions, DecodingTrace, Speculation

ENOUGH = 0.2  # no canvas is fed while this share of a block is expected to stand among the drafts behind


@dataclass
class _Row:
    """One request. tokens: so far, the last of them not yet in the cache. drafts: guesses of those that follow.

    sure: confidence of each draft. doubtful: the draft before them fell. verified, canvas: tokens of both parts in the
    pass that runs.
    """

    key: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    at_pass: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    doubtful: bool = False
    verified: int = 0
    canvas: int = 0

    @property
    def scored(self) -> int:
        """Queries whose logits are read: all but the last of the canvas, which was never trained to predict."""
        return self.verified + max(self.canvas - 1, 0)


class Speculative(Policy):
    """Rows draft and verify on their own; a forward is as wide as its widest row."""

    def __init__(self, options: DecodeOptions, eos_id: int, mask_id: int, length: int) -> None:
        super().__init__(options, eos_id, mask_id)
        self.query = 2 * length
        self._length = length
        self._mask_id = mask_id
        self._masks = [mask_id] * (length - 1)
        self._state = [_Row(0) for _ in range(options.batch_size)]
        self._causal = np.arange(1, self.query + 1)
        self._live = 0
        self._rows = self._cols = np.zeros(0, dtype=np.int64)

    def start(self, rows: Sequence[int], keys: Sequence[int], logits: torch.Tensor) -> None:
        """Each row starts with its first token and no draft."""
        zeros = np.zeros(len(rows), dtype=np.int64)
        choice = self.choose(logits, np.asarray(keys), zeros, zeros)
        for index, row in enumerate(rows):
            state = self._state[row] = _Row(int(keys[index]))
            self._append(state, *(part[index : index + 1].tolist() for part in _parts(choice)))

    def _append(self, row: _Row, tokens: list[int], log_probs: list[float], confidences: list[float]) -> None:
        row.tokens += tokens
        row.log_probs += log_probs
        row.confidences += confidences
        row.at_pass += [len(row.queries)] * len(tokens)

    def plan(self, n: int) -> Plan:
        """Each row's newest token and drafts, then its canvas; rows with less are padded."""
        self._live = n
        live = self._state[:n]
        for row in live:
            self._divide(row)
        width = max(row.verified + row.canvas for row in live)
        ids = np.zeros((n, width), dtype=np.int64)
        visible = np.ones((n, width), dtype=np.int64)
        for index, row in enumerate(live):
            split, end = row.verified, row.verified + row.canvas
            ids[index, :end] = self._fed(row)
            visible[index, :split] = self._causal[:split]
            visible[index, split:end] = end
        scored = np.array([row.scored for row in live])
        self._rows = np.repeat(np.arange(n), scored)
        self._cols = np.concatenate([np.arange(count) for count in scored])
        return Plan(ids, visible, self._rows, self._cols)

    def _fed(self, row: _Row) -> list[int]:
        """Tokens of both parts of the row's next pass."""
        split = row.verified
        if not row.canvas:
            return [row.tokens[-1], *row.drafts[: split - 1]]
        later = zip(row.drafts[split:], row.sure[split:], strict=True)
        shown = [draft if sure >= self.options.tau else self._mask_id for draft, sure in later]
        return [row.tokens[-1], *row.drafts[:split], *(shown + self._masks)[: row.canvas - 1]]

    def _divide(self, row: _Row) -> None:
        """Set how many tokens of the row its next pass verifies (its newest one included) and how many it drafts on."""
        room = self.options.max_new_tokens - len(row.tokens)
        if not row.drafts:
            row.verified, row.canvas = (0, self._length) if min(room, self._length) > 1 else (1, 0)
            return
        most = min(len(row.drafts), self._length, room)
        if self.eos_id in row.drafts[:most]:
            most = row.drafts.index(self.eos_id) + 1
        row.verified = worth_verifying(row.sure[: most - 1], self.options.token_cost, self._length)
        ends = row.verified == room or row.drafts[row.verified - 1] == self.eos_id
        enough = expected_to_stand(row.sure[row.verified :]) >= ENOUGH * self._length
        row.canvas = 0 if ends or enough else self._length

    def update(self, logits: torch.Tensor) -> np.ndarray:
        """Drafts that agree stand, and one chosen token more; the rest of the drafts is kept for the next pass."""
        live = self._state[: self._live]
        keys = np.array([row.key for row in live])[self._rows]
        slots = np.array([len(row.tokens) for row in live])[self._rows] + self._cols
        choice = self.choose(logits, keys, slots, np.zeros_like(slots))
        parts = [part.tolist() for part in _parts(choice)]
        kept = np.zeros(self._live, dtype=np.int64)
        begin = 0
        for index, row in enumerate(live):
            end = begin + row.scored
            kept[index] = self._advance(row, *(part[begin:end] for part in parts))
            begin = end
        return kept

    def _advance(self, row: _Row, tokens: list[int], log_probs: list[float], confidences: list[float]) -> int:
        """Take what a pass says of one row's scored queries; gives the number of its tokens that the cache keeps."""
        split = row.verified
        row.queries.append(split + row.canvas)
        checked = min(split, len(row.drafts)) if row.canvas else max(split - 1, 0)
        stand = 0
        while stand < checked and tokens[stand] == row.drafts[stand]:
            stand += 1
        row.checked.append(checked)
        row.accepted.append(stand)
        count = min(stand + 1, split)
        if row.canvas:
            row.drafts = row.drafts[:split] + tokens[split:]
            row.sure = row.sure[:split] + confidences[split:]
        if stand < checked:
            row.drafts[count:split], row.sure[count:split] = tokens[count:split], confidences[count:split]
        if self.eos_id in tokens[:count]:
            count = tokens.index(self.eos_id) + 1
        self._append(row, tokens[:count], log_probs[:count], confidences[:count])
        row.drafts, row.sure = row.drafts[count:], row.sure[count:]
        if row.doubtful and checked and not stand:
            row.drafts, row.sure = [], []
        row.doubtful = stand < checked
        return count

    def done(self, row: int) -> bool:
        """Ends at the end-of-sequence token or at the token limit."""
        tokens = self._state[row].tokens
        return tokens[-1] == self.eos_id or len(tokens) >= self.options.max_new_tokens

    def finish(self, row: int) -> Completion:
        """The row's tokens, with the trace of autoregressive decoding, and what its drafts were worth."""
        state, options = self._state[row], self.options
        tokens = tuple(state.tokens)
        trace = DecodingTrace(
            tokens=tokens,
            steps=(0,) * len(tokens),
            log_probs=tuple(state.log_probs),
            confidences=tuple(state.confidences),
            block_size=1,
            tau=options.tau,
            temperature=options.temperature,
            passes=tuple(state.at_pass),
        )
        speculation = Speculation(tuple(state.checked), tuple(state.accepted), tuple(state.queries))
        ended = tokens[-1] == self.eos_id
        return Completion(state.key, tokens, ended, len(state.queries), trace, speculation)

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`."""
        self._state[target] = self._state[source]


def _parts(choice: Choice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return choice.tokens, choice.log_probs, choice.confidences


def expected_to_stand(sure: Sequence[float]) -> float:
    """Expected number of drafts that stand, from their confidences: p1 + p1 p2 + ..."""
    total, reach = 0.0, 1.0
    for chance in sure:
        reach *= chance
        total += reach
    return total


def worth_verifying(sure: Sequence[float], token_cost: float, canvas: int) -> int:
    """Tokens to verify in one pass, the newest one included, so that tokens gained per unit of time are the most.

    sure: chance of each draft, in order, to stand given that those before it stand. A pass of q tokens costs
    1 + token_cost * q; verifying k drafts gains 1 + p1 + p1 p2 + ... tokens. The chance that one more stands falls
    with k, so k is right when it falls below the gain so far times the share of the cost that it would add.
    """
    fixed = 1.0 / token_cost + canvas
    count, gained, reach = 1, 1.0, 1.0
    for chance in sure:
        reach *= chance
        if reach * (fixed + count) < gained:
            break
        count += 1
        gained += reach
    return count
