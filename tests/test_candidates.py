"""Head selection, permutation and candidates: hand-computed values and properties with ties and
exclusions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.candidates import (
    Candidates,
    HeadOptions,
    best_items,
    build_candidates,
    exclude,
    permute_head,
    select_head,
)
from recbole_dgr2.data.sequences import Rows, leave_one_out_rows
from tests.test_sequences import make

INF = float("inf")


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """Few distinct values (many ties), some -inf, and an order for the first n slots."""
    rows, items = draw(st.integers(1, 4)), draw(st.integers(4, 30))
    values = st.sampled_from([0.0, -0.0, 1.0, 0.5, -3.0, 1e30, -1e30, -INF])
    cells = draw(st.lists(values, min_size=rows * items, max_size=rows * items))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    scores = torch.tensor(cells, dtype=dtype).view(rows, items)
    scores[:, 0] = -INF
    n, kmax = draw(st.integers(1, items - 1)), draw(st.integers(1, items - 1))
    order = torch.stack([torch.tensor(draw(st.permutations(range(n)))) for _ in range(rows)])
    return scores, n, kmax, order


@settings(max_examples=150)
@given(score_rows())
def test_head_is_recboles_topk_first_and_names_no_item_twice(case: tuple) -> None:
    scores, n, kmax, _ = case
    head = select_head(scores, n, kmax)
    assert head.shape == (len(scores), max(n, kmax))
    assert torch.equal(head[:, :kmax], torch.topk(scores, kmax).indices)
    assert all(len(set(row.tolist())) == len(row) for row in head)
    values = scores.gather(1, head)
    assert torch.equal(values, torch.topk(scores, max(n, kmax)).values)


@settings(max_examples=300)
@given(score_rows())
def test_topk_of_a_permuted_row_is_the_new_order(case: tuple) -> None:
    scores, n, kmax, order = case
    head = select_head(scores, n, kmax)
    result = permute_head(scores, head, order)
    for row in range(len(scores)):
        wanted = head[row, :n][order[row]].tolist() + head[row, n:].tolist()
        wanted = [i for i in wanted if scores[row, i] != -INF]
        for k in range(1, head.shape[1] + 1):
            top = torch.topk(result[row], k).indices.tolist()
            assert top[: len(wanted)] == wanted[:k]
        assert ((result[row] == -INF) == (scores[row] == -INF)).all()
        tail = [i for i in range(scores.shape[1]) if i not in head[row].tolist()]
        assert torch.equal(result[row, tail], scores[row, tail])


def test_permute_without_ties_moves_the_heads_own_values() -> None:
    scores = torch.tensor([[-INF, 5.0, 1.0, 4.0, 3.0, 2.0]])
    head = select_head(scores, 3, 2)
    assert head.tolist() == [[1, 3, 4]]
    result = permute_head(scores, head, torch.tensor([[2, 0, 1]]))
    assert result.tolist() == [[-INF, 4.0, 1.0, 3.0, 5.0, 2.0]]
    assert scores.tolist() == [[-INF, 5.0, 1.0, 4.0, 3.0, 2.0]]


def test_identity_without_ties_changes_no_bit() -> None:
    scores = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    head = select_head(scores, 10, 5)
    assert torch.equal(permute_head(scores, head, torch.arange(10).expand(7, 10)), scores)


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1, 3], [-1, 0, 1]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    scores = torch.arange(6.0)[None]
    with pytest.raises(ValueError, match="permutation of the 3"):
        permute_head(scores, select_head(scores, 3, 3), torch.tensor([order]))


def test_exclude() -> None:
    scores = torch.ones(2, 5)
    histories = [np.array([1, 3]), np.array([2])]
    assert exclude(scores, histories).tolist() == [[-INF, -INF, 1, -INF, 1], [-INF, 1, -INF, 1, 1]]
    assert exclude(scores, None).tolist() == [[-INF, 1, 1, 1, 1]] * 2
    assert scores.eq(1).all()


def test_rank_of_and_take() -> None:
    candidates = Candidates(
        Rows(np.array([1, 2]), np.array([3, 3])),
        np.array([[5, 6, 7], [8, 0, 0]]),
        np.array([[3, 2, 1], [1, -INF, -INF]], dtype=np.float32),
    )
    assert candidates.rank_of(np.array([7, 8])).tolist() == [2, 0]
    assert candidates.rank_of(np.array([9, 0])).tolist() == [3, 3]
    assert candidates.counts.tolist() == [3, 1]
    assert candidates.take(np.array([False, True])).ids.tolist() == [[8, 0, 0]]
    with pytest.raises(ValueError, match="candidates: 2 rows"):
        Candidates(candidates.rows, candidates.ids[:1], candidates.scores[:1])


@pytest.mark.parametrize("batch_size", [1, 2, 100])
@pytest.mark.parametrize("mask_history", [True, False])
def test_build_candidates(mask_history: bool, batch_size: int) -> None:
    sequences = make([], [1, 2, 3, 4, 5], [6, 1, 2], [3, 4, 6, 5], n_items=7)
    rows = leave_one_out_rows(sequences, "test")

    def score(users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        assert [len(h) for h in histories] == [len(sequences.of(u)) - 1 for u in users]
        return torch.arange(7.0).repeat(len(users), 1)

    found = build_candidates(score, rows, sequences, HeadOptions(4, 2, mask_history, batch_size))
    if mask_history:
        assert found.ids.tolist() == [[6, 5, 0, 0], [5, 4, 3, 2], [5, 2, 1, 0]]
        assert found.scores[0].tolist() == [6, 5, -INF, -INF]
    else:
        assert found.ids.tolist() == [[6, 5, 4, 3]] * 3
    assert found.scores.dtype == np.float32


def test_memory_is_one_block_of_scores() -> None:
    sequences = make([], *[[1, 2, 3]] * 50, n_items=9)
    sizes = []

    def score(users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        sizes.append(len(users))
        return torch.zeros(len(users), 9)

    build_candidates(score, leave_one_out_rows(sequences, "test"), sequences, HeadOptions(2, 2, True, 16))
    assert sizes == [16, 16, 16, 2]


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="n_candidates 0: expected at least 1"):
        HeadOptions(0, 10, True)
    with pytest.raises(ValueError, match="n_candidates 20: the catalogue has 8 items, use at most that"):
        HeadOptions(20, 5, True).check(9)
    with pytest.raises(ValueError, match="topk 10: the catalogue has 8 items"):
        HeadOptions(5, 10, True).check(9)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000), k=st.integers(1, 9), items=st.integers(1, 15_000), kinds=st.integers(0, 3)
)
def test_the_best_items_are_those_of_torch(seed: int, k: int, items: int, kinds: int) -> None:
    """Distinct scores, few distinct values, and rows that are mostly or wholly excluded."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, items + k, generator=generator)
    if kinds == 1:
        scores = (scores * 5).round()
    if kinds == 2:
        scores[0] = -INF
        scores[1, k:] = -INF
    if kinds == 3:
        scores[:, torch.randint(items + k, (items // 2,), generator=generator)] = -INF
    assert torch.equal(best_items(scores, k), torch.topk(scores, k, dim=-1).indices)
