"""How good semantic IDs are: unique, evenly used, and alike for items that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NEIGHBOURS = 10
"""Nearest neighbours of an item that are looked at."""
MOST_ITEMS = 5000
"""Items whose neighbours are looked for; more are sampled."""
_ROWS = 512


@dataclass(frozen=True)
class LevelQuality:
    """Figures of one level (codes) and of the prefix that ends with it.

    Args:
        unique: share of distinct prefixes: their number over that of the items.
        codes: codes in use.
        entropy: of the code's distribution over items, bits; `perplexity` is 2 to this power.
        neighbours: share of the 10 nearest neighbours (cosine) that share the prefix, mean over items.
        random_pairs: the same for two items drawn at random.
        category: share of an item's prefix-mates that have its first (broadest) category, mean over the items with
            mates and categories; None where no item has both.
        narrowest: the same for the last (narrowest) category.
    """

    unique: float
    codes: int
    entropy: float
    perplexity: float
    neighbours: float
    random_pairs: float
    category: float | None
    narrowest: float | None


@dataclass(frozen=True)
class SidQuality:
    """Figures of all semantic IDs of a catalogue.

    Args:
        items: number of items.
        unique: share of distinct semantic IDs; 1 once the last level was made unique.
        collisions: items that shared their whole code with another before that.
        moved: items whose last code was changed for it.
        levels: figures a level, coarsest first.
        neighbours_category: share of the 10 nearest neighbours of the embeddings with an item's first category: what
            prefixes can reach at best; None without categories.
    """

    items: int
    unique: float
    collisions: int
    moved: int
    levels: tuple[LevelQuality, ...]
    neighbours_category: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def sid_quality(
    codes: np.ndarray,
    last_before: np.ndarray,
    embeddings: np.ndarray,
    categories: Sequence[tuple[str, ...]],
    seed: int,
) -> SidQuality:
    """Measure semantic IDs against the embeddings they were made from.

    Args:
        codes: int64 [I, L], padding left out.
        last_before: int64 [I], last code before it was made unique.
        embeddings: float32 [I, d], rows of length 1.
        categories: of each item, broadest first.
        seed: draws MOST_ITEMS items of a larger catalogue.
    """
    before = np.column_stack([codes[:, :-1], last_before])
    _, inverse, counts = np.unique(before, axis=0, return_inverse=True, return_counts=True)
    prefixes = _prefixes(codes)
    items, near = nearest_neighbours(embeddings, seed)
    kinds = [[names[end] if names else "" for names in categories] for end in (0, -1)]
    first, last = (np.unique(names, return_inverse=True)[1].reshape(-1) for names in kinds)
    known = np.array([bool(names) for names in categories])
    alike = [prefix[items][:, None] == prefix[near] for prefix in prefixes]
    levels = tuple(
        LevelQuality(
            unique=(int(prefix.max()) + 1) / len(codes),
            codes=len(np.unique(code)),
            entropy=entropy_bits(code),
            perplexity=2.0 ** entropy_bits(code),
            neighbours=float(share.mean()) if share.size else 0.0,
            random_pairs=random_share(prefix),
            category=mates_alike(prefix[known], first[known]),
            narrowest=mates_alike(prefix[known], last[known]),
        )
        for prefix, code, share in zip(prefixes, codes.T, alike, strict=True)
    )
    pairs = known[items][:, None] & known[near]
    same = (first[items][:, None] == first[near])[pairs]
    return SidQuality(
        items=len(codes),
        unique=levels[-1].unique,
        collisions=int((counts[inverse.reshape(-1)] > 1).sum()),
        moved=int((codes[:, -1] != last_before).sum()),
        levels=levels,
        neighbours_category=float(same.mean()) if same.size else None,
    )


def _prefixes(codes: np.ndarray) -> list[np.ndarray]:
    """A number 0..P-1 for the prefix of each length 1..L, int64 [I] each."""
    lengths = range(1, codes.shape[1] + 1)
    return [np.unique(codes[:, :n], axis=0, return_inverse=True)[1].reshape(-1) for n in lengths]


def entropy_bits(code: np.ndarray) -> float:
    """Entropy of the values of an int array, bits."""
    share = np.unique(code, return_counts=True)[1] / len(code)
    return float(-(share * np.log2(share)).sum()) + 0.0


def random_share(group: np.ndarray) -> float:
    """Probability that two different items drawn at random are of one group; 0 for a single item."""
    counts = np.bincount(group)
    pairs = len(group) * (len(group) - 1)
    return float((counts * (counts - 1)).sum() / pairs) if pairs else 0.0


def mates_alike(group: np.ndarray, kind: np.ndarray) -> float | None:
    """Share of the other items of an item's group that have its kind, mean over items with others; None without.

    Args:
        group, kind: int64 [I].
    """
    sizes = np.unique(group, return_inverse=True, return_counts=True)
    both = np.unique(np.column_stack([group, kind]), axis=0, return_inverse=True, return_counts=True)
    others = sizes[2][sizes[1].reshape(-1)] - 1
    same = both[2][both[1].reshape(-1)] - 1
    return float((same[others > 0] / others[others > 0]).mean()) if (others > 0).any() else None


def nearest_neighbours(embeddings: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Items, int64 [M], M <= MOST_ITEMS, and their nearest others by cosine, int64 [M, NEIGHBOURS or I - 1]."""
    count = len(embeddings)
    items = np.sort(np.random.default_rng(seed).permutation(count)[:MOST_ITEMS])
    width = min(NEIGHBOURS, count - 1)
    blocks = [np.zeros((0, width), dtype=np.int64)]
    for start in range(0, len(items), _ROWS):
        own = items[start : start + _ROWS]
        cosine = embeddings[own] @ embeddings.T
        cosine[np.arange(len(own)), own] = -np.inf
        blocks.append(np.argpartition(-cosine, width - 1, axis=1)[:, :width] if width else blocks[0][:0])
    return items, np.concatenate(blocks) if width else np.zeros((len(items), 0), dtype=np.int64)
