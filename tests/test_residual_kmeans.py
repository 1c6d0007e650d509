"""Residual k-means recovers hand-made clusters; the last level makes every code unique, whatever the vectors."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from recbole_dgr2.data import residual_kmeans as module
from recbole_dgr2.data.quantized import (
    CodeOptions,
    Quantized,
    colliding_groups,
    distinct_codes,
    nearest_codes,
    squared_distances,
)
from recbole_dgr2.data.residual_kmeans import cluster, residual_kmeans
from tests.clusters import nested, partition

SMALL = CodeOptions(levels=2, codes=4, seed=0)


def test_nested_clusters_are_recovered() -> None:
    vectors, labels = nested()
    found = residual_kmeans(vectors, SMALL)
    assert partition(found.codes[:, :1]) == partition(labels[:, :1])
    assert partition(found.codes) == partition(labels)


def test_codes_are_those_of_the_nearest_codewords() -> None:
    vectors, _ = nested()
    found = residual_kmeans(vectors, SMALL)
    for level in range(2):
        distances = squared_distances(found.residual(level), found.codebooks[level])
        assert np.array_equal(found.codes[:, level], distances.argmin(axis=1))


def test_the_error_falls_with_every_level() -> None:
    vectors = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    errors = residual_kmeans(vectors, CodeOptions(4, 8)).errors()
    assert errors[0] == 1.0
    assert all(after < before for before, after in pairwise(errors))


def test_errors_by_hand() -> None:
    vectors = np.array([[0.0, 3.0], [4.0, 0.0]], dtype=np.float32)
    books = (np.array([[0.0, 2.0], [4.0, 0.0]], dtype=np.float32), np.array([[0.0, 1.0]], dtype=np.float32))
    found = Quantized(vectors, books, np.array([[0, 0], [1, 0]]))
    assert found.errors() == pytest.approx([1.0, 1 / 25, 1 / 25])
    assert Quantized(0 * vectors, books, found.codes).errors()[0] == 1.0


def test_the_same_seed_gives_the_same_and_another_need_not() -> None:
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    options = CodeOptions(3, 16, seed=5)
    one, two = residual_kmeans(vectors, options), residual_kmeans(vectors, options)
    assert np.array_equal(one.codes, two.codes)
    other = residual_kmeans(vectors, CodeOptions(3, 16, seed=6))
    assert not np.array_equal(one.codes, other.codes)


def test_the_vectors_given_are_not_changed() -> None:
    vectors, _ = nested()
    before = vectors.copy()
    residual_kmeans(vectors, SMALL).unique_codes(4)
    assert np.array_equal(vectors, before)


def test_fewer_different_vectors_than_codes() -> None:
    vectors = np.array([[0.0], [0.0], [2.0]], dtype=np.float32)
    assert cluster(vectors, 8, 0).tolist() == [[0.0], [2.0]]
    codes = residual_kmeans(vectors, CodeOptions(2, 8)).unique_codes(8)
    assert len(partition(codes)) == 3 and codes.max() < 8
    assert codes[0, 0] == codes[1, 0] != codes[2, 0]


def test_many_vectors_go_by_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 10)
    vectors, labels = nested(each=40)
    found = residual_kmeans(vectors, SMALL)
    assert partition(found.codes[:, :1]) == partition(labels[:, :1])
    assert np.array_equal(found.codes, residual_kmeans(vectors, SMALL).codes)


@pytest.mark.parametrize("vectors", [np.zeros((0, 3)), np.zeros(3)])
def test_no_vectors(vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected vectors \[I, d\]"):
        residual_kmeans(vectors, SMALL)


@pytest.mark.parametrize(("levels", "codes", "name"), [(0, 4, "levels 0"), (2, 1, "codes 1")])
def test_bad_options(levels: int, codes: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CodeOptions(levels, codes)


def test_colliding_groups_by_hand() -> None:
    codes = np.array([[0, 1], [2, 3], [0, 1], [0, 2], [1, 1], [2, 4], [2, 3]])
    assert [group.tolist() for group in colliding_groups(codes)] == [[0, 2, 3], [1, 5, 6]]
    assert colliding_groups(codes[[0, 1, 3]]) == []
    assert [group.tolist() for group in colliding_groups(np.array([[1], [2], [1]]))] == [[0, 1, 2]]


@settings(max_examples=40)
@given(arrays(np.float64, (3, 4), elements=st.integers(0, 9).map(float)))
def test_reassignment_costs_least(distances: np.ndarray) -> None:
    found = distinct_codes(distances, 4)
    best = min(distances[range(3), list(choice)].sum() for choice in permutations(range(4), 3))
    assert len(set(found.tolist())) == 3
    assert distances[range(3), found].sum() == best


def test_codes_without_a_codeword_come_last_then_further_ones() -> None:
    distances = np.array([[0.0, 1.0], [0.0, 5.0], [0.0, 9.0], [0.0, 9.0], [0.0, 9.0]])
    found = distinct_codes(distances, 4).tolist()
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert found[0] == 1 and found.count(4) == 1


def test_only_colliding_prefixes_change() -> None:
    vectors = np.array([[0.0], [0.1], [5.0], [5.4]], dtype=np.float32)
    books = (
        np.array([[0.0], [5.0]], dtype=np.float32),
        np.array([[0.0], [0.2], [0.4]], dtype=np.float32),
    )
    codes = np.array([[0, 0], [0, 0], [1, 0], [1, 2]])
    assert Quantized(vectors, books, codes).unique_codes(3).tolist() == [[0, 0], [0, 1], [1, 0], [1, 2]]


@settings(max_examples=60)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.integers(1, 3)),
        elements=st.integers(-2, 2).map(float),
    ),
    st.integers(1, 3),
    st.integers(2, 6),
)
def test_codes_are_always_unique(vectors: np.ndarray, levels: int, codes: int) -> None:
    found = residual_kmeans(vectors, CodeOptions(levels, codes))
    unique = found.unique_codes(codes)
    assert len(partition(unique)) == len(vectors)
    assert np.array_equal(unique[:, :-1], found.codes[:, :-1])
    prefixes = partition(unique[:, :-1]) if levels > 1 else {frozenset(range(len(vectors)))}
    for group in prefixes:
        last = unique[sorted(group), -1]
        assert last.max() < max(codes, len(group))
        if len(group) <= codes:
            assert last.max() < codes


def test_nearest_codes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    vectors, words = rng.normal(size=(23, 3)), rng.normal(size=(5, 3))
    whole = nearest_codes(vectors, words)
    monkeypatch.setattr("recbole_dgr2.data.quantized._BLOCK", 20)
    assert np.array_equal(nearest_codes(vectors, words), whole)
    plain = np.square(vectors[:, None] - words).sum(-1)
    assert np.array_equal(whole, plain.argmin(1))
