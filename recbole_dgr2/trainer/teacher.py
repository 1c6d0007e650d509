"""The teacher of a distillation: any scorer of tokens, asked without gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recbole_dgr2.model.adapters import Adapted, adapter_off
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.divergence import TeacherScores, teacher_scores
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.trainer.distilled import Reading
from recbole_dgr2.trainer.state import fingerprint_weights

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""ids, positions, allowed, rows, cols -> logits [T, V]: the call of a `TokenScorer`."""


def frozen_teacher(teacher: Backbone, student: Backbone, spec: BlockDiffusionSpec) -> TokenScorer:
    """The teacher as a scorer of tokens that is never trained.

    Raises:
        ValueError: it has another vocabulary than the student.
    """
    if teacher.tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise ValueError(
            f"teacher: its tokenizer has {len(teacher.tokenizer)} tokens and is not the student's "
            f"({len(student.tokenizer)}), expected the parent of the converted weights (stage ar_teacher of the run)"
        )
    require_rows(teacher.rows, student, spec.mask_id)
    scorer = TokenScorer(teacher.model).eval()
    return scorer.requires_grad_(False)


class BaseTeacher:
    """The teacher under a student's adapter: one backbone in memory, asked with the adapter off.

    Its weights are what the adapter was put over, and are never trained; what the adapter learns does not reach it.
    """

    def __init__(self, student: Adapted) -> None:
        self.model = student.model
        self._scorer = TokenScorer(student.model)
        self.fingerprint = student.base.digest

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """float32 logits [T, V], as a `TokenScorer` gives them."""
        with adapter_off(self.model):
            return self._scorer(*inputs)


def teacher_fingerprint(teacher: Score) -> str | None:
    """What tells one teacher from another; None for a function of which nothing is known."""
    if isinstance(teacher, BaseTeacher):
        return teacher.fingerprint
    return fingerprint_weights(teacher) if isinstance(teacher, nn.Module) else None


def require_rows(rows: int, student: Backbone, mask_id: int) -> None:
    """A teacher has the student's rows; those that the conversion added, from the mask token on, it may lack."""
    if not min(mask_id, student.rows) <= rows <= student.rows:
        raise ValueError(
            f"teacher: {rows} embedding rows, the student has {student.rows} (mask token {mask_id}), expected the "
            "parent of the converted weights (stage ar_teacher of the run)"
        )


@torch.no_grad()
def ask(
    teacher: Score, reading: Reading, student: Backbone, spec: BlockDiffusionSpec, top_k: int
) -> TeacherScores:
    """The teacher's distributions at every slot of some answers, which it reads once; top_k as in `teacher_scores`.

    Raises:
        ValueError: a teacher of another vocabulary than the student's.
        FloatingPointError: it gives something that is no number; names the sample.
    """
    layout = reading.layout
    if isinstance(teacher, nn.Module):
        teacher.to(layout.ids.device)
    logits = teacher(layout.ids, layout.positions, layout.allowed, reading.rows, reading.cols)
    require_rows(logits.shape[1], student, spec.mask_id)
    broken = logits.isnan().any(dim=1).nonzero()
    if len(broken):
        key = reading.keys[int(reading.rows[broken[0, 0]])]
        raise FloatingPointError(
            f"distillation: the teacher's logits are NaN for list {key}, expected numbers; train ar_teacher again"
        )
    return teacher_scores(logits, spec.mask_id, top_k)
