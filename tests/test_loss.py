"""Losses against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from recbole_dgr2.model.loss import token_weights, weighted_nll


def test_token_weights() -> None:
    answer = torch.tensor([[False, True, True], [False, False, True]])
    real = torch.tensor([[True, True, False], [True, True, True]])
    assert token_weights(answer, real, 0.25, 2.0).tolist() == [[0.25, 2.0, 0.0], [0.25, 0.25, 2.0]]
    with pytest.raises(ValueError, match="answer_weight"):
        token_weights(answer, real, 1.0, -1.0)


def test_weighted_nll_by_hand() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    loss = weighted_nll(probabilities.log(), torch.tensor([1, 2]), torch.tensor([1.0, 3.0]))
    assert loss.item() == pytest.approx((math.log(4) + 3 * math.log(1.25)) / 4)


def test_uniform_logits_give_log_v() -> None:
    assert weighted_nll(torch.zeros(5, 64), torch.arange(5), torch.ones(5)).item() == pytest.approx(
        math.log(64)
    )


def test_padding_and_scale_change_nothing() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    targets, weights = torch.arange(6), torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 0.0])
    loss = weighted_nll(logits, targets, weights)
    assert torch.equal(loss, weighted_nll(logits[:4], targets[:4], weights[:4]))
    assert torch.allclose(loss, weighted_nll(logits, targets, 7 * weights))


def test_half_precision_is_scored_in_float32() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    loss = weighted_nll(logits, torch.arange(4), torch.ones(4))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, weighted_nll(logits.float(), torch.arange(4), torch.ones(4)))


@pytest.mark.parametrize("slots", [0, 3])
def test_no_weight_is_zero_with_a_gradient(slots: int) -> None:
    logits = torch.randn(slots, 4, requires_grad=True)
    loss = weighted_nll(logits, torch.zeros(slots, dtype=torch.long), torch.zeros(slots))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()


def test_an_unweighted_impossible_target_is_harmless() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]], requires_grad=True)
    loss = weighted_nll(logits, torch.tensor([1, 0]), torch.tensor([0.0, 1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
