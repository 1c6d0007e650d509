"""Reinforcement learning on replayed rollouts: what the teacher's phase and the student's stage share.

An iteration rolls groups of answers out, rewards them, scores every committed token again by replay (the old
log-probabilities), and takes optimizer steps on `J = 1 / sum |o_i| * sum_i sum_t min(rho A, clip(rho, 1 - e_low,
1 + e_high) A)`, with rho of the replayed log-probabilities and A = (R - mean) / std of the group. No KL term. Tokens
up to and including the end of the sequence count; those after it in the last block are context.

Sources: DAPO (arXiv 2503.14476); Diffusion-GR2 (arXiv 2607.01170, Eq. 4 and Section 3.6).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from recbole_dgr2.data.examples import collate
from recbole_dgr2.decode.types import Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec, build_layout
from recbole_dgr2.model.loss import token_weights
from recbole_dgr2.model.objectives import clipped_objective, group_advantages
from recbole_dgr2.model.replay import (
    PLAIN,
    Replay,
    Trajectory,
    replay_all,
    replay_chunks,
    replay_copies,
    replayed_logits,
)
from recbole_dgr2.system import processes
from recbole_dgr2.trainer.graded import Graded, PolicyOptions, Practice, Replayed
from recbole_dgr2.trainer.on_policy import Material, OnPolicy
from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.rollouts import Answer, Roller, draw_groups, figures
from recbole_dgr2.trainer.scoring import Scored, score_slots

SCORED_TOGETHER = 8  # trajectories a forward when old log-probabilities are taken
LARGEST_GAP = 1e-3

logger = logging.getLogger(__name__)


class PolicyGradient(OnPolicy[Replayed | Scored]):
    """The common part; a stage names itself, its parent and the mode of its rollouts.

    Args:
        roller: rolls the weights out that are trained.
        options: checked options; `epochs` counts iterations, `train_batch_size` rollouts an optimizer step.
        info_data: see `Stage`.
        practice: what is practised on.
        own: how.

    Raises:
        ValueError: a roller of another mode, or `ar_weight` above 0 without lessons.
    """

    mode: ClassVar[str]

    def __init__(
        self,
        roller: Roller,
        options: StageOptions,
        info_data: Mapping[str, Any],
        practice: Practice,
        own: PolicyOptions,
    ) -> None:
        if roller.options.mode != self.mode or (self.mode == "block" and roller.spec is None):
            raise ValueError(
                f"stage {self.name}: rollouts of mode {roller.options.mode!r}, expected {self.mode!r}"
            )
        if own.ar_weight and not len(practice.lessons):
            raise ValueError(f"ar_weight={own.ar_weight}: there are no examples to rehearse, expected 0")
        super().__init__(roller.backbone, options, info_data)
        self.roller, self.practice, self.own = roller, practice, own
        self.spec = roller.spec
        self.coefficients = {"policy": 1.0, "ar": own.ar_weight} if own.ar_weight else {"policy": 1.0}

    @property
    def mask_id(self) -> int | None:
        """The token that is never scored, if the model has one."""
        return self.spec.mask_id if self.spec else None

    def collect(self, prompts: Sequence[Request], iteration: int) -> Material:
        """Rolls groups out, rewards and replays them; logs how far replay is from the rollouts."""
        groups = draw_groups(self.roller, self.practice.judge, prompts, self.own.sampling, iteration)
        metrics = figures(groups)
        answers = [answer for group in groups.kept for answer in group]
        trajectories = [answer.trajectory for answer in answers]
        old = processes.spread(trajectories, self._old_log_probs)
        metrics.update(self._gaps(trajectories, old, iteration))
        advantages = _advantages(groups.kept)
        return Material([Graded(*each) for each in zip(trajectories, advantages, old, strict=True)], metrics)

    @torch.no_grad()
    def _old_log_probs(self, trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        found = [[0.0] * len(trajectory.tokens) for trajectory in trajectories]
        order = np.argsort([self._cost(trajectory) for trajectory in trajectories], kind="stable").tolist()
        for start in range(0, len(order), SCORED_TOGETHER):
            together = order[start : start + SCORED_TOGETHER]
            for rows, replay in self._replays([trajectories[index] for index in together]):
                values = self._scores(self.scorer, replay.to(self.backbone.device))[0].tolist()
                places = zip(replay.rows.tolist(), replay.slots.tolist(), values, strict=True)
                for row, slot, value in places:
                    found[together[rows[row]]][slot] = value
        return [tuple(values) for values in found]

    def _gaps(
        self, trajectories: Sequence[Trajectory], old: Sequence[Sequence[float]], iteration: int
    ) -> dict[str, float]:
        """Mean and largest |rollout - replay| of a log-probability, over the counted slots, if there are any."""
        gaps = [
            abs(rolled - replayed)
            for trajectory, values in zip(trajectories, old, strict=True)
            for rolled, replayed in zip(trajectory.log_probs[: trajectory.length], values, strict=False)
        ]
        if not gaps:
            return {}
        found = {"replay_gap": float(np.mean(gaps)), "replay_gap_max": max(gaps)}
        if found["replay_gap_max"] > LARGEST_GAP:
            logger.warning(
                "%s iteration %d: replayed log-probabilities are up to %.2g (mean %.2g) from those of the rollouts, "
                "expected at most %g",
                *(self.name, iteration, found["replay_gap_max"], found["replay_gap"], LARGEST_GAP),
            )
        return found

    def example(self, values: Mapping[str, Any]) -> Graded:
        """The inverse of `asdict`."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values["trajectory"].items()
        }
        return Graded(Trajectory(**fields), values["advantage"], tuple(values["old_log_probs"]))

    def per_iteration(self, prompts: int) -> int:
        """Rollouts of all groups."""
        return min(self.own.sampling.groups, prompts) * self.own.sampling.samples

    def assess(self, prompts: Sequence[Request]) -> dict[str, float]:
        """Mean reward and valid rate of greedy answers, decoded in the mode of the rollouts; the loss is -reward."""
        judged = [
            self.practice.judge(completion.key, self.roller.text(completion.token_ids), completion.finished)
            for completion in self.roller.greedy(prompts)
        ]
        reward = float(np.mean([each.reward for each in judged]))
        return {"loss": -reward, "reward": reward, "valid_rate": float(np.mean([e.valid for e in judged]))}

    def collate(self, examples: Sequence[Graded]) -> Sequence[Graded]:
        """Rollouts are padded chunk by chunk."""
        return examples

    def length(self, example: Graded) -> int:
        """Prompt and response once, and the response once a noisy copy."""
        return self._cost(example.trajectory)

    def _cost(self, trajectory: Trajectory) -> int:
        return len(trajectory.prompt_ids) + len(trajectory.tokens) * (1 + trajectory.passes)

    def parts(
        self, batch: Sequence[Graded], generators: Sequence[torch.Generator]
    ) -> list[Replayed | Scored]:
        """The replay in chunks of noisy copies, then a lesson for each rollout where lessons are rehearsed."""
        chunks = self._replays([graded.trajectory for graded in batch])
        parts: list[Replayed | Scored] = [
            self._replayed(replay, [batch[row] for row in rows]) for rows, replay in chunks
        ]
        return [*parts, self._rehearsal(generators)] if "ar" in self.coefficients else parts

    def prepare(self, batch: Sequence[Graded], generators: Sequence[torch.Generator]) -> Replayed:
        """The whole replay in one forward."""
        replay = replay_all([graded.trajectory for graded in batch], self.spec, self.backbone.pad_id)
        return self._replayed(replay.take(replay.counted), batch)

    def _replays(self, trajectories: Sequence[Trajectory]) -> Iterator[tuple[tuple[int, ...], Replay]]:
        """Chunks of noisy copies, counted slots only, and which of `trajectories` are in each."""
        for rows, copies in replay_chunks(trajectories, self.own.max_copies):
            kept = [trajectories[row] for row in rows]
            replay = replay_copies(kept, self.spec, self.backbone.pad_id, copies)
            yield rows, replay.take(replay.counted)

    def _replayed(self, replay: Replay, batch: Sequence[Graded]) -> Replayed:
        rows, slots = replay.rows.tolist(), replay.slots.tolist()
        old = [batch[row].old_log_probs[slot] for row, slot in zip(rows, slots, strict=True)]
        advantages = [batch[row].advantage for row in rows]
        return Replayed(
            replay, torch.tensor(old, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
        )

    def _rehearsal(self, generators: Sequence[torch.Generator]) -> Scored:
        """The clean stream of one lesson a generator, wherever a token does not see itself."""
        lessons = self.practice.lessons
        drawn = [lessons[int(torch.randint(len(lessons), (1,), generator=each))] for each in generators]
        batch = collate(drawn, self.backbone.pad_id)
        layout = build_layout(
            (batch.prompt, batch.prompt_length), (batch.response, batch.response_length), self.spec or PLAIN
        )
        reasoning, answer = self.options.reasoning_weight, self.options.answer_weight
        weights = token_weights(batch.answer, layout.real, reasoning, answer)
        rows, slots = (layout.clean_scorable & (weights > 0)).nonzero(as_tuple=True)
        targets, terms = batch.response[rows, slots], {"ar": weights[rows, slots]}
        return Scored(layout, rows, layout.clean_source[rows, slots], targets, terms)

    def score(self, model: nn.Module, prepared: Replayed | Scored) -> dict[str, Tensor]:
        """Returns the sums of `policy`, `clipped` and `entropy`, or of `ar` and its accuracy."""
        if isinstance(prepared, Scored):
            return score_slots(model, prepared, self.mask_id)
        log_probs, entropies = self._scores(model, prepared.replay)
        objective, clipped = clipped_objective(
            log_probs, prepared.old, prepared.advantages, self.own.clip_low, self.own.clip_high
        )
        return {"policy": -objective.sum(), "clipped": clipped.sum(), "entropy": entropies.sum()}

    def _scores(self, model: nn.Module, replay: Replay) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the committed tokens, differentiable, and entropies in nats, float32 [M] each."""
        scores = replayed_logits(model, replay, self.mask_id).log_softmax(dim=-1)
        entropies = torch.special.entr(scores.detach().exp()).sum(dim=-1)
        return scores.gather(1, replay.targets[:, None])[:, 0], entropies

    def block_diffusion(self) -> BlockDiffusionSpec | None:
        """The spec that is saved with the weights."""
        return self.spec

    def settings(self) -> dict[str, Any]:
        """Decoding, learning, judge and lessons; `max_copies` changes nothing that is computed."""
        decoding = asdict(replace(self.roller.options, batch_size=1))
        return {
            "spec": self.spec.to_dict() if self.spec else None,
            "decoding": decoding,
            "own": asdict(replace(self.own, max_copies=1)),
            "parent": self.parent,
            "judge": repr(self.practice.judge),
            "lessons": [repr(lesson) for lesson in self.practice.lessons] if self.own.ar_weight else [],
        }


def _advantages(groups: Sequence[Sequence[Answer]]) -> list[float]:
    """Advantages of all answers, group by group."""
    if not groups:
        return []
    rewards = [[answer.judgement.reward for answer in group] for group in groups]
    return group_advantages(torch.tensor(rewards, dtype=torch.float64)).flatten().tolist()
