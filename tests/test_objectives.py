"""Advantages and the clipped objective against values computed by hand, gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.model.objectives import clipped_objective, group_advantages, has_signal


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 3.0, 3.0, 5.0], [-1.0, -1.0, -1.0, -1.0], [0.3, 0.3, 0.3, -1.0]])
    found = group_advantages(rewards)
    root = math.sqrt(2.0)
    assert found[0].tolist() == pytest.approx([-2 / root, 0.0, 0.0, 2 / root])
    assert found[1].tolist() == [0.0] * 4
    assert found[2].tolist() == pytest.approx([1 / math.sqrt(3)] * 3 + [-math.sqrt(3)])
    assert has_signal(rewards).tolist() == [True, False, True]


@settings(max_examples=50)
@given(st.lists(st.integers(-10, 10), min_size=2, max_size=8))
def test_advantages_have_mean_zero_and_variance_one(values: list[int]) -> None:
    rewards = torch.tensor([values]) / 10
    found = group_advantages(rewards)[0]
    if len(set(values)) == 1:
        assert found.tolist() == [0.0] * len(values)
        return
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(found.square().mean()) == pytest.approx(1.0, abs=1e-6)
    moved = group_advantages(3 * rewards + 7)[0]
    torch.testing.assert_close(moved, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "clipped"),
    [
        (1.0, 2.0, 2.0, False),
        (1.25, 2.0, 2.5, False),  # below 1 + 0.28
        (1.5, 2.0, 2.56, True),
        (0.5, 2.0, 1.0, False),  # falls although it should rise: the full gradient stays
        (0.9, -1.0, -0.9, False),
        (0.5, -1.0, -0.8, True),
        (1.5, -1.0, -1.5, False),
        (3.0, 0.0, 0.0, False),
    ],
)
def test_objective_by_hand(ratio: float, advantage: float, value: float, clipped: bool) -> None:
    new, old = torch.tensor([math.log(ratio) - 1.0]), torch.tensor([-1.0])
    objective, held = clipped_objective(new, old, torch.tensor([advantage]), 0.2, 0.28)
    assert objective.tolist() == pytest.approx([value], rel=1e-6)
    assert held.tolist() == [clipped]


def test_gradient_is_the_finite_difference() -> None:
    """Of a toy softmax policy, at ratios inside and outside the clip, both signs of the advantage."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    actions = torch.randint(5, (40,), generator=generator)
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    own = logits.log_softmax(1).gather(1, actions[:, None])[:, 0]
    old = own + 0.4 * torch.randn(40, generator=generator, dtype=torch.float64)

    def value(scores: torch.Tensor) -> torch.Tensor:
        log_probs = scores.log_softmax(1).gather(1, actions[:, None])[:, 0]
        return clipped_objective(log_probs, old, advantages, 0.2, 0.28)[0].sum() / 40

    clipped = clipped_objective(own, old, advantages, 0.2, 0.28)[1]
    assert 0 < int(clipped.sum()) < 40
    assert torch.autograd.gradcheck(value, (logits.requires_grad_(),), eps=1e-7, atol=1e-6)
    (gradient,) = torch.autograd.grad(value(logits), logits)
    assert bool((gradient[clipped] == 0).all()) and bool((gradient[~clipped] != 0).any(dim=1).all())


def test_at_the_old_policy_it_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    objective, clipped = clipped_objective(log_probs, log_probs.detach(), advantages, 0.2, 0.2)
    objective.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == advantages.tolist()
    assert not bool(clipped.any())


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0), (0.2, math.inf)])
def test_bad_clip(low: float, high: float) -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="clip_low"):
        clipped_objective(one, one, one, low, high)
