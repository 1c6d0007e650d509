"""Divergences of a student's next-token distributions from a teacher's, pure and in float32 (float64 stays float64).

A token that neither may choose (the mask token) has log-probability minus infinity on both sides and adds nothing.
M scored slots, T slots of the teacher, V vocabulary, k tokens kept of the teacher, W = V or k + 1.

Forward KL is the objective of Diffusion-GR2 (arXiv 2607.01170, Eq. 2); reverse KL and the generalised Jensen-Shannon
divergence are those of on-policy distillation at large (Agarwal et al., arXiv 2306.13649).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recbole_dgr2.model.forward import without_mask_id

Kind = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
KINDS: tuple[str, ...] = get_args(Kind)

CHUNK = 2**22
"""Elements of a chunk of logits: what `divergence` needs beyond its inputs and their gradient is about six of them."""


@dataclass(frozen=True)
class Divergence:
    """Which divergence is taken.

    kind: "forward_kl" = KL(teacher || student), "reverse_kl" = KL(student || teacher), "jensen_shannon" =
    `beta * KL(teacher || m) + (1 - beta) * KL(student || m)` with `m = beta * teacher + (1 - beta) * student`.
    beta: in (0, 1), of "jensen_shannon" alone; 1/2 is the symmetric one. top_k: tokens kept of the teacher, 0 = all.
    """

    kind: Kind = "forward_kl"
    beta: float = 0.5
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"divergence must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 0.0 < self.beta < 1.0:
            raise ValueError(f"beta of jensen_shannon must be in (0, 1), got {self.beta!r}; 0.5 is symmetric")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0: the whole vocabulary), got {self.top_k!r}")


@dataclass(frozen=True)
class TeacherScores:
    """Distributions of a teacher at T slots.

    log_probs: [T, V]; with `ids`, [T, k + 1]: of those tokens, likeliest first, and of all other tokens together.
    ids: int64 [T, k], or None. best: int64 [T], the likeliest token. width: V, the teacher's embedding rows.

    The rest is kept as one bucket, and neither side is renormalised over the k tokens. So the divergence is that of two
    coarser distributions: never above the full one, 0 where the full one is, and the student is still told how much to
    leave to the other tokens. Renormalised, it would be taught to leave them nothing, and its confidences, which decide
    what a block decoder commits, would come out too high.
    """

    log_probs: Tensor
    ids: Tensor | None
    best: Tensor
    width: int


@torch.no_grad()
def teacher_scores(logits: Tensor, mask_id: int | None, top_k: int = 0) -> TeacherScores:
    """What is kept of a teacher's logits, float [T, V]; `top_k` 0, or as large as the vocabulary, keeps all."""
    width = logits.shape[1]
    mask_id = _column(mask_id, width)
    log_probs = without_mask_id(logits, mask_id).float().log_softmax(dim=1)
    best = log_probs.argmax(dim=1)
    if not 0 < top_k < width - (mask_id is not None):
        return TeacherScores(log_probs, None, best, width)
    ids = log_probs.topk(top_k, dim=1).indices
    return TeacherScores(_coarse(log_probs, ids), ids, best, width)


def divergence(
    logits: Tensor, teacher: TeacherScores, index: Tensor, options: Divergence, mask_id: int | None
) -> Tensor:
    """[M]: divergence at each slot, in nats, differentiable in the student's logits.

    The slots are worked through in chunks of `CHUNK` logits, which are computed again in the backward pass, so that
    memory beyond the inputs and their gradient does not grow with M.

    Args:
        logits: the student's, float [M, V']. Columns beyond the teacher's are left out: rows that the student's
            embedding has gained, which are of no token.
        teacher: distributions over the same tokens.
        index: int64 [M], the slot of `teacher` for each slot of the student; several may share one.
        options: which divergence; its `top_k` is that of `teacher` and is not read here.
        mask_id: token that is never chosen, None where there is none.
    """
    logits, mask_id = logits[:, : teacher.width], _column(mask_id, teacher.width)
    size = max(1, CHUNK // max(1, teacher.width))
    chunks = [
        (part, teacher, at, options, mask_id)
        for part, at in zip(logits.split(size), index.split(size), strict=True)
    ]
    if len(chunks) == 1:
        return _of_slots(*chunks[0])
    # nothing random in a chunk: no state of the generators has to be kept for the second computation
    again = [checkpoint(_of_slots, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(again)


def _column(mask_id: int | None, width: int) -> int | None:
    """The mask token, None for a model that was never converted and has no row for it."""
    return None if mask_id is None or mask_id >= width else mask_id


def _of_slots(
    logits: Tensor, teacher: TeacherScores, index: Tensor, options: Divergence, mask_id: int | None
) -> Tensor:
    """The divergence at every slot of one chunk."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    student = without_mask_id(logits, mask_id).log_softmax(dim=1)
    if teacher.ids is not None:
        student = _coarse(student, teacher.ids[index])
    wanted = teacher.log_probs[index].to(student.dtype)
    if options.kind == "forward_kl":
        return _kl(wanted, student)
    if options.kind == "reverse_kl":
        return _kl(student, wanted)
    mixed = _mixture(wanted, student, options.beta)
    return options.beta * _kl(wanted, mixed) + (1 - options.beta) * _kl(student, mixed)


def _coarse(log_probs: Tensor, ids: Tensor) -> Tensor:
    """[M, k + 1]: log-probabilities of `ids` [M, k], and of all other tokens together."""
    others = log_probs.scatter(1, ids, -torch.inf)
    return torch.cat([log_probs.gather(1, ids), others.logsumexp(dim=1, keepdim=True)], dim=1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """[M]: sum of `exp(p) * (p - q)` over log-probabilities [M, W]; 0 * log 0 = 0, with a zero gradient."""
    impossible = p == -torch.inf
    return (p.exp() * (p.masked_fill(impossible, 0.0) - q.masked_fill(impossible, 0.0))).sum(dim=1)


def _mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """[M, W]: log of `share * exp(p) + (1 - share) * exp(q)`; a finite number where both are 0, where none reads it."""
    impossible = (p == -torch.inf) & (q == -torch.inf)
    p, q = p.masked_fill(impossible, 0.0), q.masked_fill(impossible, 0.0)
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))
