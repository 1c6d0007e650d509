"""Figures of semantic IDs by hand."""

from __future__ import annotations

import numpy as np
import pytest

from recbole_dgr2.data import sid_quality as module
from recbole_dgr2.data.sid_quality import (
    entropy_bits,
    mates_alike,
    nearest_neighbours,
    random_share,
    sid_quality,
)


def test_entropy_by_hand() -> None:
    assert entropy_bits(np.array([0, 1, 2, 3])) == pytest.approx(2.0)
    assert entropy_bits(np.array([5, 5, 5])) == 0.0
    assert entropy_bits(np.array([0, 0, 0, 1])) == pytest.approx(0.811278, abs=1e-6)


def test_random_share_by_hand() -> None:
    assert random_share(np.array([0, 0, 0, 1])) == pytest.approx(6 / 12)
    assert random_share(np.array([0, 1, 2])) == 0.0
    assert random_share(np.array([0])) == 0.0


def test_mates_alike_by_hand() -> None:
    group = np.array([0, 0, 0, 1, 1, 2])
    kind = np.array([7, 7, 8, 7, 7, 7])
    # mates of each: 1 of 2, 1 of 2, 0 of 2, 1 of 1, 1 of 1, none
    assert mates_alike(group, kind) == pytest.approx((0.5 + 0.5 + 0 + 1 + 1) / 5)
    assert mates_alike(np.arange(3), kind[:3]) is None
    assert mates_alike(group[:0], kind[:0]) is None


def test_neighbours_are_the_nearest_by_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    items, near = nearest_neighbours(vectors, seed=0)
    assert items.tolist() == list(range(50))
    cosine = vectors @ vectors.T
    np.fill_diagonal(cosine, -np.inf)
    for item, found in zip(items, near, strict=True):
        assert set(found.tolist()) == set(np.argsort(-cosine[item])[:10].tolist())
    monkeypatch.setattr(module, "MOST_ITEMS", 20)
    monkeypatch.setattr(module, "_ROWS", 7)
    some, near_some = nearest_neighbours(vectors, seed=0)
    assert len(some) == 20
    assert all(
        set(found.tolist()) == set(near[item].tolist()) for item, found in zip(some, near_some, strict=True)
    )


def test_figures_by_hand() -> None:
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 2]])
    vectors = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], dtype=np.float32)
    categories = (("Hair", "Gel"), ("Hair", "Wax"), ("Nail",), ())
    found = sid_quality(codes, np.array([0, 0, 0, 2]), vectors, categories, seed=0)
    assert (found.items, found.unique, found.collisions, found.moved) == (4, 1.0, 2, 1)
    first, second = found.levels
    assert (first.unique, first.codes, first.entropy, first.perplexity) == (0.5, 2, 1.0, 2.0)
    assert first.random_pairs == pytest.approx(4 / 12)
    assert first.neighbours == pytest.approx(1 / 3)  # each has three others, one of which is its mate
    assert (
        first.category == 1.0 and first.narrowest == 0.0
    )  # the fourth has no category, so the third no mate
    assert (second.unique, second.codes, second.neighbours) == (1.0, 3, 0.0)
    assert second.category is None and second.random_pairs == 0.0
    assert found.neighbours_category == pytest.approx(2 / 6)


def test_one_item() -> None:
    found = sid_quality(np.array([[0, 0]]), np.array([0]), np.ones((1, 1), dtype=np.float32), ((),), seed=0)
    assert found.unique == 1.0 and found.neighbours_category is None
    assert found.to_dict()["levels"][0]["category"] is None
