"""A retriever's top-N for each row, and the change of a score row that puts them into a new order.

RecBole ranks by `torch.topk(scores, max(topk))`, whose order among equal scores depends on k. So the head is
always taken with RecBole's own call first and extended afterwards, it always has max(N, max(topk)) ids, and the
re-ordered head is made strictly decreasing and strictly better than the tail. Then RecBole's evaluator reads
exactly the list that was re-ranked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from recbole_dgr2.data.sequences import Rows, Sequences

SCORE_CELLS = 2**23
"""Scores of a block at most (32 MiB as float32)."""

CHUNK = 256
"""Items of a chunk in `best_items`."""

ScoreFunction = Callable[[np.ndarray, list[np.ndarray]], torch.Tensor]


@dataclass(frozen=True)
class Candidates:
    """The N best items of each row, best first.

    Attributes:
        rows: What is ranked, `[R]`.
        ids: int64 `[R, N]`, internal item ids; 0 where a row has fewer than N valid items (always at the end).
        scores: float32 `[R, N]`, the retriever's scores; -inf where `ids` is 0.
    """

    rows: Rows
    ids: np.ndarray
    scores: np.ndarray

    def __post_init__(self) -> None:
        if self.ids.shape != self.scores.shape or self.ids.ndim != 2 or len(self.ids) != len(self.rows):
            raise ValueError(
                f"candidates: {len(self.rows)} rows, ids {list(self.ids.shape)}, scores {list(self.scores.shape)}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n(self) -> int:
        """N, the number of slots of a row."""
        return self.ids.shape[1]

    @property
    def counts(self) -> np.ndarray:
        """int64 `[R]`: the number of slots that hold an item."""
        return (self.ids != 0).sum(axis=1)

    def rank_of(self, targets: np.ndarray) -> np.ndarray:
        """int64 `[R]`: the 0-based slot of each row's target, N where it is not a candidate."""
        hit = (self.ids == targets[:, None]) & (self.ids != 0)
        return np.where(hit.any(axis=1), hit.argmax(axis=1), self.n)

    def take(self, index: np.ndarray | slice) -> Candidates:
        """The rows at `index`: a slice, positions, or a bool mask."""
        return Candidates(self.rows.take(index), self.ids[index], self.scores[index])


@dataclass(frozen=True)
class HeadOptions:
    """How candidates are taken from score rows.

    Attributes:
        n_candidates: N, at least 1.
        kmax: RecBole's max(topk); decides the order among equal scores, so that it is RecBole's own.
        mask_history: Exclude every item of the row's history (RecBole does for general models only).
        batch_size: Rows scored at a time by `build_candidates` at most, fewer where the catalogue is large; only
            one such block of scores exists at once.
    """

    n_candidates: int
    kmax: int
    mask_history: bool
    batch_size: int = 256

    def __post_init__(self) -> None:
        for name in ("n_candidates", "kmax", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")

    def rows_at_once(self, n_items: int) -> int:
        """Rows of a block: at most `batch_size`, and no more than SCORE_CELLS scores."""
        return max(1, min(self.batch_size, SCORE_CELLS // n_items))

    def check(self, n_items: int) -> None:
        """Raise ValueError where the catalogue (`n_items` counts padding) is smaller than the head."""
        for name, value in (("n_candidates", self.n_candidates), ("topk", self.kmax)):
            if value > n_items - 1:
                raise ValueError(f"{name} {value}: the catalogue has {n_items - 1} items, use at most that")


def exclude(scores: torch.Tensor, histories: list[np.ndarray] | None) -> torch.Tensor:
    """A copy of `scores` `[B, n_items]` with padding, and the items of each row's history if given, at -inf."""
    masked = scores.clone()
    masked[:, 0] = -torch.inf
    if histories:
        rows = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
        masked[torch.from_numpy(rows), torch.from_numpy(np.concatenate(histories))] = -torch.inf
    return masked


def select_head(scores: torch.Tensor, n: int, kmax: int) -> torch.Tensor:
    """The best max(n, kmax) ids of each row, in RecBole's own order.

    Args:
        scores: `[B, n_items]`, what is excluded at -inf.
        n: Candidates to re-rank.
        kmax: RecBole's max(topk); the first `kmax` ids are exactly `torch.topk(scores, kmax)`.

    Returns:
        int64 `[B, max(n, kmax)]`. Rows with fewer valid items end in ids whose score is -inf.
    """
    first = best_items(scores, kmax)
    if n <= kmax:
        return first
    # Excluded items are lifted to the lowest finite value, so that they come before the ids already taken: a
    # head never names an item twice, even where the valid items run out.
    remaining = scores.clamp(min=torch.finfo(scores.dtype).min).scatter(1, first, -torch.inf)
    return torch.cat((first, torch.topk(remaining, n - kmax, dim=-1).indices), dim=1)


def best_items(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`torch.topk(scores, k).indices`, several times faster on large catalogues.

    The k best items of a row lie in the k chunks whose maxima are greatest, so only these are sorted. Rows with equal
    scores among their best are left to `torch.topk` itself, since its order of ties depends on the whole row.
    """
    rows, items = scores.shape
    chunks = items // CHUNK
    if chunks < 4 * (k + 1):
        return torch.topk(scores, k, dim=-1).indices
    body, rest = scores[:, : chunks * CHUNK].view(rows, chunks, CHUNK), scores[:, chunks * CHUNK :]
    chosen = torch.topk(body.amax(dim=2), k + 1, dim=1).indices
    inside = body.gather(1, chosen[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    places = (chosen[:, :, None] * CHUNK + torch.arange(CHUNK, device=scores.device)).flatten(1)
    outside = torch.arange(chunks * CHUNK, items, device=scores.device).expand(rows, -1)
    values, slots = torch.topk(torch.cat((inside, rest), dim=1), k + 1, dim=1)
    best = torch.cat((places, outside), dim=1).gather(1, slots[:, :k])
    tied = (values[:, 1:] >= values[:, :-1]).any(dim=1)
    if tied.any():
        best[tied] = torch.topk(scores[tied], k, dim=-1).indices
    return best


def permute_head(scores: torch.Tensor, head: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Score rows in which the head comes in a new order; the tail, and what is excluded, is untouched.

    The head's own values, sorted, are given to the new order. Where they are equal to one another or to the
    best of the tail they are raised by as few representable steps as make the head strictly decreasing and
    strictly better than the tail, so `torch.topk(result, k)` is the new order for every k up to the head's
    size. Slots whose score is -inf stay last whatever `order` says.

    Args:
        scores: `[B, n_items]`, floating point.
        head: int64 `[B, H]` from `select_head`.
        order: int64 `[B, N]`, N <= H: a permutation of the first N slots of the head, new best first.

    Returns:
        A new tensor `[B, n_items]`.
    """
    n = order.shape[1]
    if not torch.equal(order.sort(dim=1).values, torch.arange(n, device=order.device).expand_as(order)):
        raise ValueError(f"order: expected a permutation of the {n} candidate slots in every row")
    values = scores.gather(1, head).sort(dim=1, descending=True).values
    ids = torch.cat((head[:, :n].gather(1, order), head[:, n:]), dim=1)
    excluded = torch.isneginf(scores.gather(1, ids)).to(torch.int8)
    ids = ids.gather(1, torch.sort(excluded, dim=1, stable=True).indices)
    below = scores.scatter(1, head, -torch.inf).max(dim=1).values
    infinity = torch.full_like(below, torch.inf)
    for slot in range(head.shape[1] - 1, -1, -1):
        own = values[:, slot]
        valid = ~torch.isneginf(own)
        values[:, slot] = torch.where(valid, torch.maximum(own, torch.nextafter(below, infinity)), own)
        below = torch.where(valid, values[:, slot], below)
    return scores.scatter(1, ids, values)


def build_candidates(
    retriever_score: ScoreFunction, rows: Rows, sequences: Sequences, options: HeadOptions
) -> Candidates:
    """Candidates of every row; score rows are made and dropped `options.batch_size` at a time.

    Args:
        retriever_score: Maps users int64 `[B]` and their whole histories (oldest first) to scores
            `[B, n_items]`, e.g. `Retriever.score`.
        rows: `[R]`.
        sequences: Where the histories come from.
        options: How the head is taken.

    Raises:
        ValueError: The catalogue is smaller than the head, or a row is not in `sequences`.
    """
    options.check(sequences.n_items)
    n = options.n_candidates
    ids = np.zeros((len(rows), n), dtype=np.int64)
    values = np.full((len(rows), n), -np.inf, dtype=np.float32)
    size = options.rows_at_once(sequences.n_items)
    for start in range(0, len(rows), size):
        block = slice(start, start + size)
        part = rows.take(block)
        histories = part.histories(sequences)
        scores = exclude(retriever_score(part.users, histories), histories if options.mask_history else None)
        head = select_head(scores, n, options.kmax)[:, :n]
        values[block], ids[block] = head_arrays(scores, head)
    return Candidates(rows, ids, values)


def head_arrays(scores: torch.Tensor, head: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Scores float32 and ids int64 of a head `[B, N]`, excluded slots as -inf and 0."""
    values = scores.gather(1, head)
    ids = torch.where(torch.isneginf(values), 0, head)
    return values.float().cpu().numpy(), ids.cpu().numpy()
