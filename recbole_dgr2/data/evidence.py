"""Evidence: facts about a candidate that are computed from training interactions and item text alone.

A fact is a number for each (history, candidate) pair. `fit_evidence` gathers the statistics of one set of training
interactions; `measure_facts` reads them for lists of candidates; `FactScale` turns the numbers into a few levels, the
form in which a prompt can show them. Nothing here sees a target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.sparse as sp
from sklearn.feature_extraction.text import TfidfVectorizer

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.sequences import Sequences

FACTS = ("match", "popular", "next", "together", "words", "alike", "brand")
"""Names of the facts, in the order of the last axis of a fact array; first letters differ, prompts use them.

match: the retriever's score, relative to the list. popular: interactions of the item (log). next: how often it soon
followed the last item of the history (log). together: how often it occurs near the other recent items, with decay.
words: likeness of its text to that of the last item. alike: the same to the recent history, with decay. brand: share of
the recent history that has its brand.
"""

RECENT = 10
DECAY = 0.8
WINDOW = 5
SOON, FADE = 3, 0.6
"""Steps within which an item counts as followed by another, and how much less each further step counts."""
_ROWS_AT_A_TIME = 1024
_WORD = r"(?u)\b\w+\b"


class FactSource(Protocol):
    """Whatever knows the facts about candidates."""

    def measure(self, candidates: Candidates, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Facts of every candidate, float64 [R, N, len(FACTS)], as `measure_facts` gives them."""
        ...


@dataclass(frozen=True)
class Evidence:
    """Item statistics of one set of training interactions; n_items counts the padding item 0."""

    popularity: np.ndarray
    """float64 [n_items], log(1 + number of interactions)."""
    neighbours: sp.csr_matrix
    """float64 [n_items, n_items], cosine-normalised co-occurrence within WINDOW steps."""
    followers: sp.csr_matrix
    """float64 [n_items, n_items], row i, column j: how often j followed i within SOON steps, with FADE."""
    text: sp.csr_matrix
    """float64 [n_items, n_words], TF-IDF rows of unit length, of title, categories and brand."""
    brands: np.ndarray
    """int64 [n_items], 0 where the brand is unknown."""

    def measure(self, candidates: Candidates, histories: Sequence[np.ndarray]) -> np.ndarray:
        """`measure_facts` of this evidence."""
        return measure_facts(self, candidates, histories)


def fit_evidence(sequences: Sequences, item_text: ItemText) -> Evidence:
    """Gather item statistics from training `sequences` and the items' text."""
    counts = np.bincount(sequences.items, minlength=sequences.n_items).astype(np.float64)
    names = {name: number for number, name in enumerate(sorted(set(item_text.brands) - {""}), start=1)}
    return Evidence(
        popularity=np.log1p(counts),
        neighbours=_cooccurrence(sequences),
        followers=_followers(sequences),
        text=_text_matrix(item_text),
        brands=np.array([names.get(brand, 0) for brand in item_text.brands], dtype=np.int64),
    )


def measure_facts(evidence: Evidence, candidates: Candidates, histories: Sequence[np.ndarray]) -> np.ndarray:
    """Facts of every candidate, float64 [R, N, len(FACTS)]; candidates that are padding get zeros.

    `histories` holds each row's item ids, oldest first; the last RECENT are read.
    """
    facts = np.zeros((*candidates.ids.shape, len(FACTS)))
    recent = _recent_items(histories)
    for start in range(0, len(facts), _ROWS_AT_A_TIME):
        block = slice(start, start + _ROWS_AT_A_TIME)
        facts[block, :, 2:] = _history_facts(evidence, candidates.ids[block], recent[block])
    facts[..., 0] = _relative_scores(candidates.scores)
    facts[..., 1] = evidence.popularity[candidates.ids]
    facts[candidates.ids == 0] = 0.0
    return facts


def _recent_items(histories: Sequence[np.ndarray]) -> np.ndarray:
    """The last RECENT items of each history, newest first, int64 [R, RECENT], filled with item 0."""
    recent = np.zeros((len(histories), RECENT), dtype=np.int64)
    for row, history in enumerate(histories):
        newest = history[::-1][:RECENT]
        recent[row, : len(newest)] = newest
    return recent


def _history_facts(evidence: Evidence, ids: np.ndarray, recent: np.ndarray) -> np.ndarray:
    """next, together, words, alike and brand, float64 [R, N, 5], for candidates [R, N] and recent items [R, RECENT].

    The padding item shares nothing with any item, so short histories need no mask.
    """
    decay = DECAY ** np.arange(RECENT)
    shape = (*ids.shape, RECENT)
    left = np.broadcast_to(ids[..., None], shape).ravel()
    right = np.broadcast_to(recent[:, None, :], shape).ravel()
    last = np.broadcast_to(recent[:, :1], ids.shape)
    followed = np.asarray(evidence.followers[last.ravel(), ids.ravel()]).reshape(ids.shape)
    near = np.asarray(evidence.neighbours[left, right]).reshape(shape)
    likeness = _row_products(evidence.text, left, right).reshape(shape)
    known = evidence.brands[left] > 0
    same_brand = (known & (evidence.brands[left] == evidence.brands[right])).reshape(shape)
    length = np.maximum((recent > 0).sum(axis=1), 1)[:, None]
    weight = np.maximum(((recent > 0) * decay).sum(axis=1), 1e-12)[:, None]
    return np.stack(
        [
            np.log1p(followed),
            near[..., 1:] @ decay[1:],
            likeness[..., 0],
            likeness @ decay / weight,
            same_brand.sum(axis=-1) / length,
        ],
        axis=-1,
    )


def _row_products(matrix: sp.csr_matrix, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Inner products of pairs of rows, float64 [pairs]."""
    return np.asarray(matrix[left].multiply(matrix[right]).sum(axis=1)).ravel()


def _relative_scores(scores: np.ndarray) -> np.ndarray:
    """Scores as deviations from the list's mean in units of its standard deviation, [R, N]."""
    finite = np.isfinite(scores)
    values = np.where(finite, scores, 0.0).astype(np.float64)
    count = np.maximum(finite.sum(axis=1, keepdims=True), 1)
    mean = values.sum(axis=1, keepdims=True) / count
    spread = np.sqrt((np.where(finite, values - mean, 0.0) ** 2).sum(axis=1, keepdims=True) / count)
    return np.where(finite, (values - mean) / np.maximum(spread, 1e-12), 0.0)


def _steps(sequences: Sequences, most: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each step from 1 to `most`: the step, and items of one user that many steps apart, earlier and later."""
    user_of = np.repeat(np.arange(sequences.n_users), np.diff(sequences.offsets))
    for step in range(1, most + 1):
        same = user_of[step:] == user_of[:-step]
        yield step, sequences.items[:-step][same], sequences.items[step:][same]


def _pairs(n_items: int, counts: Sequence[tuple[float, np.ndarray, np.ndarray]]) -> sp.csr_matrix:
    """float64 [n_items, n_items]: the summed weights of (weight, first items, second items)."""
    weights = np.concatenate([np.full(len(first), weight) for weight, first, _ in counts])
    places = [np.concatenate(part) for part in zip(*(entry[1:] for entry in counts), strict=True)]
    return sp.coo_matrix((weights, places), shape=(n_items, n_items)).tocsr()


def _cooccurrence(sequences: Sequences) -> sp.csr_matrix:
    """Pairs of items at most WINDOW steps apart in a user's sequence, normalised by both items' totals."""
    pairs = _pairs(
        sequences.n_items, [(1.0, first, second) for _, first, second in _steps(sequences, WINDOW)]
    )
    pairs = pairs + pairs.T
    scale = 1.0 / np.sqrt(np.maximum(np.asarray(pairs.sum(axis=1)).ravel(), 1.0))
    return (sp.diags(scale) @ pairs @ sp.diags(scale)).tocsr()


def _followers(sequences: Sequences) -> sp.csr_matrix:
    return _pairs(
        sequences.n_items,
        [(FADE ** (step - 1), first, second) for step, first, second in _steps(sequences, SOON)],
    )


def _text_matrix(item_text: ItemText) -> sp.csr_matrix:
    parts = zip(item_text.titles, item_text.categories, item_text.brands, strict=True)
    documents = [" ".join([title, *categories, brand]) for title, categories, brand in parts]
    if not any(re.search(_WORD, document) for document in documents):
        return sp.csr_matrix((len(documents), 1))
    return TfidfVectorizer(sublinear_tf=True, token_pattern=_WORD).fit_transform(documents).tocsr()


@dataclass(frozen=True)
class FactScale:
    """Cuts each fact into levels 0..n_levels-1, so that a prompt can show it as one token.

    Level 0 is "none" where a fact is often at its minimum (no co-occurrence, no shared brand); the other levels are
    quantiles of the rest. A fact that never varies is left out of `active`.
    """

    n_levels: int
    edges: tuple[tuple[float, ...], ...]
    """For each fact of FACTS, ascending bounds, at most n_levels - 1."""

    @property
    def active(self) -> tuple[int, ...]:
        """Indices into FACTS of the facts that vary."""
        return tuple(index for index, bounds in enumerate(self.edges) if bounds)

    def only(self, facts: Sequence[int]) -> FactScale:
        """The same scale with no other facts (indices into FACTS) than these."""
        return FactScale(
            self.n_levels, tuple(e if fact in facts else () for fact, e in enumerate(self.edges))
        )

    def levels(self, facts: np.ndarray) -> np.ndarray:
        """Levels of the active facts, int64 [R, N, len(active)], for facts float64 [R, N, len(FACTS)]."""
        columns = [np.searchsorted(self.edges[fact], facts[..., fact], side="right") for fact in self.active]
        return np.stack(columns, axis=-1) if columns else np.zeros((*facts.shape[:2], 0), dtype=np.int64)


def fit_fact_scale(facts: np.ndarray, n_levels: int) -> FactScale:
    """Levels from the facts of training lists, float64 [R, N, len(FACTS)].

    Raises:
        ValueError: fewer than two levels.
    """
    if n_levels < 2:
        raise ValueError(f"fact_levels is {n_levels}; expected at least 2")
    values = facts.reshape(-1, facts.shape[-1])
    return FactScale(
        n_levels, tuple(_level_edges(values[:, fact], n_levels) for fact in range(values.shape[1]))
    )


def _level_edges(values: np.ndarray, n_levels: int) -> tuple[float, ...]:
    lowest = values.min() if len(values) else 0.0
    above = values[values > lowest + 1e-12]
    if len(above) == 0:
        return ()
    floor = [lowest + 1e-12] if len(above) < 0.98 * len(values) else []
    inner = n_levels - len(floor)
    return tuple(np.unique(np.concatenate([floor, np.quantile(above, np.arange(1, inner) / inner)])).tolist())
