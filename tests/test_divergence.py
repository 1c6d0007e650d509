"""Divergences: values by hand, gradients against finite differences, properties, the mask token, top-k, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recbole_dgr2.model import divergence as module
from recbole_dgr2.model.divergence import KINDS, Divergence, divergence, teacher_scores

TEACHER = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
STUDENT = torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.1, 0.8]])
KL = 0.5 * math.log(2) + 0.25 * math.log(0.5)  # of the first row, either way round
ALL = [Divergence(kind, 0.3) for kind in KINDS]  # type: ignore[arg-type]


def random_logits(rows: int, width: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(
        rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def between(student: Tensor, teacher: Tensor, options: Divergence, mask_id: int | None = None) -> Tensor:
    scores = teacher_scores(teacher, mask_id, options.top_k)
    return divergence(student, scores, torch.arange(len(student)), options, mask_id)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_kl_by_hand(kind: Any) -> None:
    found = between(STUDENT.log(), TEACHER.log() + 7.0, Divergence(kind))
    assert found.tolist() == pytest.approx([KL, 0.0], abs=1e-6)


def test_kl_is_not_symmetric_and_teacher_comes_first() -> None:
    teacher, student = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert between(student, teacher, Divergence("forward_kl")).item() == pytest.approx(forward, abs=1e-6)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert between(student, teacher, Divergence("reverse_kl")).item() == pytest.approx(reverse, abs=1e-6)


def test_jensen_shannon_by_hand() -> None:
    share = 0.25
    mixed = share * TEACHER[0] + (1 - share) * STUDENT[0]
    wanted = share * (TEACHER[0] * (TEACHER[0] / mixed).log()).sum()
    wanted += (1 - share) * (STUDENT[0] * (STUDENT[0] / mixed).log()).sum()
    found = between(STUDENT.log(), TEACHER.log(), Divergence("jensen_shannon", share))
    assert found.tolist() == pytest.approx([wanted.item(), 0.0], abs=1e-6)


def test_top_k_by_hand_keeps_the_rest_as_one_token() -> None:
    teacher, student = torch.tensor([[0.6, 0.2, 0.1, 0.1]]), torch.tensor([[0.3, 0.3, 0.2, 0.2]])
    wanted = 0.6 * math.log(0.6 / 0.3) + 0.4 * math.log(0.4 / 0.7)
    assert between(student.log(), teacher.log(), Divergence(top_k=1)).item() == pytest.approx(
        wanted, abs=1e-6
    )


@settings(max_examples=60)
@given(st.integers(2, 12), st.integers(0, 10**6), st.sampled_from(ALL), st.integers(0, 12))
def test_never_negative_zero_when_equal_and_top_k_never_above(
    width: int, seed: int, options: Divergence, top_k: int
) -> None:
    student, teacher = random_logits(5, width, seed), random_logits(5, width, seed + 1)
    full, kept = between(student, teacher, options), Divergence(options.kind, options.beta, top_k)
    coarse = between(student, teacher, kept)
    assert full.min() >= -1e-6 and coarse.min() >= -1e-6
    assert bool((coarse <= full + 1e-5).all())
    assert between(teacher, teacher - 3.0, options).abs().max() < 1e-6
    assert between(teacher, teacher - 3.0, kept).abs().max() < 1e-6


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(0, 10**6), st.floats(0.05, 0.95))
def test_jensen_shannon_is_symmetric_at_a_half_and_bounded(width: int, seed: int, beta: float) -> None:
    student, teacher = random_logits(4, width, seed, 9.0), random_logits(4, width, seed + 1, 9.0)
    half = Divergence("jensen_shannon", 0.5)
    torch.testing.assert_close(
        between(student, teacher, half), between(teacher, student, half), atol=1e-5, rtol=1e-5
    )
    exchanged = between(teacher, student, Divergence("jensen_shannon", 1 - beta))
    found = between(student, teacher, Divergence("jensen_shannon", beta))
    torch.testing.assert_close(found, exchanged, atol=1e-5, rtol=1e-5)
    assert found.max() <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 1e-6


@pytest.mark.parametrize("options", ALL, ids=KINDS)
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("mask_id", [None, 2])
def test_gradient_is_the_finite_difference(options: Divergence, top_k: int, mask_id: int | None) -> None:
    options = Divergence(options.kind, options.beta, top_k)
    student, teacher = random_logits(3, 7, 0, 1.5).requires_grad_(), random_logits(3, 7, 1, 1.5)
    assert torch.autograd.gradcheck(lambda logits: between(logits, teacher, options, mask_id), (student,))


@pytest.mark.parametrize("options", ALL, ids=KINDS)
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_mask_token_is_as_good_as_absent(options: Divergence, top_k: int) -> None:
    options = Divergence(options.kind, options.beta, top_k)
    student, teacher = random_logits(4, 6, 0), random_logits(4, 6, 1)
    student[:, 3], teacher[:, 3] = 50.0, -torch.inf  # whatever stands there
    student.requires_grad_()
    found = between(student, teacher, options, mask_id=3)
    kept = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found, between(student[:, kept], teacher[:, kept], options))
    found.sum().backward()
    assert student.grad is not None and bool(torch.isfinite(student.grad).all())
    assert not student.grad[:, 3].any()


def test_top_k_of_the_whole_vocabulary_is_the_whole_vocabulary() -> None:
    teacher = random_logits(2, 6, 0)
    assert teacher_scores(teacher, None, 6).ids is None and teacher_scores(teacher, 5, 5).ids is None
    kept = teacher_scores(teacher, 5, 4)
    assert kept.ids is not None and kept.log_probs.shape == (2, 5)
    torch.testing.assert_close(kept.log_probs.exp().sum(dim=1), torch.ones(2))
    assert torch.equal(kept.best, kept.ids[:, 0])


def test_half_precision_is_compared_in_float32() -> None:
    student, teacher = random_logits(4, 300, 0).bfloat16(), random_logits(4, 300, 1).bfloat16()
    found = between(student, teacher, Divergence())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, between(student.float(), teacher.float(), Divergence()))


def keeper(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A hook that notes what autograd saves."""

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    return keep


@pytest.mark.parametrize("options", ALL, ids=KINDS)
@pytest.mark.parametrize("top_k", [0, 3])
def test_chunks_change_nothing_and_bound_what_is_kept(
    options: Divergence, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Divergence(options.kind, options.beta, top_k)
    teacher = teacher_scores(random_logits(50, 20, 1).float(), 4, top_k)
    index = torch.arange(50) // 2  # two slots of the student for each of the teacher
    gradients, values = [], []
    for chunk in (10**6, 60):
        monkeypatch.setattr(module, "CHUNK", chunk)
        student = random_logits(50, 20, 0).float().requires_grad_()
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(keeper(kept), lambda tensor: tensor):
            found = divergence(student, teacher, index, options, mask_id=4)
        found.sum().backward()
        assert student.grad is not None
        gradients.append(student.grad)
        values.append(found.detach())
    inputs = {index.untyped_storage().data_ptr(), student.untyped_storage().data_ptr(), *(
        t.untyped_storage().data_ptr() for t in (teacher.log_probs, teacher.ids) if t is not None
    )}  # fmt: skip
    assert sum(t.numel() for t in kept if t.untyped_storage().data_ptr() not in inputs) <= 6 * 60
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("options", ALL, ids=KINDS)
def test_rows_that_the_student_gained_are_left_out(options: Divergence) -> None:
    student, teacher = random_logits(4, 8, 0).requires_grad_(), random_logits(4, 6, 1)
    found = between(student, teacher, options, mask_id=6)
    torch.testing.assert_close(found, between(student[:, :6], teacher, options))
    found.sum().backward()
    assert student.grad is not None and not student.grad[:, 6:].any()


def test_no_slots_is_an_empty_result_with_a_gradient() -> None:
    student = torch.zeros(0, 5, requires_grad=True)
    found = between(student, torch.zeros(0, 5), Divergence(top_k=2))
    found.sum().backward()
    assert found.shape == (0,) and student.grad is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "kl"}, r"divergence must be one of forward_kl, reverse_kl, jensen_shannon, got 'kl'"),
        ({"beta": 1.0}, r"beta .* in \(0, 1\), got 1.0"),
        ({"top_k": -1}, r"top_k must be an integer >= 0 .*got -1"),
        ({"top_k": 2.0}, r"top_k .*got 2.0"),
    ],
)
def test_bad_options_are_one_line_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Divergence(**values)
    assert "\n" not in str(caught.value)
