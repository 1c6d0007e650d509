"""On-policy distillation (OPD): the student answers by its own decoding rule, and learns what the teacher would have
said at every slot of those answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recbole_dgr2.data.examples import Example, collate
from recbole_dgr2.decode.types import Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.divergence import Divergence, Kind, divergence
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.model.replay import Trajectory
from recbole_dgr2.system import processes
from recbole_dgr2.trainer.answers import Answered, answer_marker, answer_start, turn_of
from recbole_dgr2.trainer.batches import VALIDATION_STEP, generators, sorted_batches
from recbole_dgr2.trainer.distilled import (
    State,
    Units,
    all_masked,
    drawn,
    reading_of,
    recorded,
    state_of,
    traces_of,
)
from recbole_dgr2.trainer.on_policy import Material, OnPolicy
from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.rollouts import Roller, trajectory_of
from recbole_dgr2.trainer.scoring import Scored, score_slots
from recbole_dgr2.trainer.teacher import BaseTeacher, Score, ask, teacher_fingerprint


@dataclass(frozen=True)
class DistillationOptions:
    """What the student is taught on its own answers.

    prompts: lists that an iteration rolls out; successive iterations take others until all had their turn. samples:
    answers a prompt. temperature: of these answers, above 0: greedy answers of a prompt are all the same.
    divergence, beta, teacher_top_k: see `model.divergence.Divergence`.
    ar_weight: weight of the divergence of the clean stream from the teacher. It trains the seeds, which the decoder
    takes from the clean stream, and keeps that stream as good as the teacher, in whose place it verifies drafts. (A
    cross-entropy to the student's own answers would teach it their mistakes.)
    all_mask_share: share of the answers that are read with all slots masked, from a random anchor, instead of in a
    recorded state: what a speculative decoder drafts from.
    supervised_weight: weight of the cross-entropy to the trace of the same list, masked by `noise`.

    Raises ValueError for an option outside its range.
    """

    prompts: int = 64
    samples: int = 4
    temperature: float = 1.0
    divergence: Kind = "forward_kl"
    beta: float = 0.5
    teacher_top_k: int = 0
    ar_weight: float = 1.0
    all_mask_share: float = 0.25
    supervised_weight: float = 0.0
    noise: NoiseOptions = field(default_factory=NoiseOptions)

    def __post_init__(self) -> None:
        for name in ("prompts", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected an integer >= 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature!r} with samples={self.samples}: expected a number above 0 (1 is "
                "usual); greedy answers of a prompt are all the same"
            )
        for name in ("ar_weight", "supervised_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a finite number >= 0")
        if not 0 <= self.all_mask_share <= 1:
            raise ValueError(f"all_mask_share={self.all_mask_share!r}: expected a number in [0, 1]")
        _ = self.measure

    @property
    def measure(self) -> Divergence:
        """The divergence."""
        return Divergence(self.divergence, self.beta, self.teacher_top_k)


class Distillation(OnPolicy[Units]):
    """OPD: the divergence of the student on its canvases from the teacher on the clean answer, at masked slots up to
    the end of the answer (the end-of-sequence token included, slots after it never), reasoning and answer weighted
    apart; beside it, terms for the clean stream and for supervised traces.

    An answer that was cut off teaches its tokens like any other; it has no end-of-sequence slot to learn from.

    Source: Diffusion-GR2 (arXiv 2607.01170), Eq. 2, with the alignment of its Section 3.5: the teacher reads the clean
    answer causally, the student the canvas that it decoded; both are shifted by one.

    In the log, `listed` is the share of rollouts whose ranked list was found (another is weighed as reasoning all
    along), `agreement` is the share of masked slots at which student and teacher would choose the same token, and
    `reasoning` and `answer` are the unweighted divergences at masked slots.

    Args:
        roller: converted weights and the rule they decode by, at `own.temperature`.
        options, info_data: see `Stage`; an epoch is an iteration, a batch counts answers.
        teacher: scores tokens as a `TokenScorer` does (see `frozen_teacher`); called without gradients.
        own: what is taught.

    Raises:
        ValueError: weights that were not converted, or a rule of another temperature.
    """

    name = "distillation"
    parent = "conversion"

    def __init__(
        self,
        roller: Roller,
        options: StageOptions,
        info_data: Mapping[str, Any],
        teacher: Score,
        own: DistillationOptions,
    ) -> None:
        super().__init__(roller.backbone, options, info_data)
        if roller.spec is None or roller.options.mode != "block":
            raise ValueError(
                f"stage {self.name}: the student answers in mode {roller.options.mode!r}, expected converted weights "
                "that decode in mode 'block' (stage conversion)"
            )
        if roller.options.temperature != own.temperature:
            raise ValueError(f"temperature={own.temperature}: the rollouts have {roller.options.temperature}")
        self.roller, self.spec, self.teacher, self.own = roller, roller.spec, teacher, own
        self.reads_backbone = isinstance(teacher, BaseTeacher)
        self.marker: tuple[int, ...] = ()
        terms = {"divergence": 1.0, "ar": own.ar_weight, "supervised": own.supervised_weight}
        self.coefficients = {name: weight for name, weight in terms.items() if weight}

    def fit(self, train: Sequence[Example], valid: Sequence[Example], folder: Path) -> Path:
        """See `Stage.fit`; the examples are prompts to answer, and their traces show how a ranked list begins."""
        self.marker = answer_marker(train)
        return super().fit(train, valid, folder)

    def per_iteration(self, prompts: int) -> int:
        """All answers of an iteration."""
        return min(self.own.prompts, prompts) * self.own.samples

    def collect(self, prompts: Sequence[Example], iteration: int) -> Material:
        """The student's answers to the prompts whose turn it is."""
        turn = turn_of(len(prompts), self.own.prompts, self.options.seed, iteration)
        chosen = [prompts[index] for index in turn for _ in range(self.own.samples)]
        requests = [Request(prompts[index].key, prompts[index].prompt_ids) for index in turn]
        rolled = self.roller.roll_out(requests, self.own.samples, iteration)
        answers = [
            self._answered(trajectory, prompt) for (trajectory, _), prompt in zip(rolled, chosen, strict=True)
        ]
        lengths = [trajectory.length for trajectory, _ in rolled]
        metrics = {
            "length": float(np.mean(lengths)),
            "finished": float(np.mean([done for _, done in rolled])),
            "listed": float(np.mean([each.answer_start < each.trajectory.length for each in answers])),
        }
        return Material(answers, metrics)

    def _answered(self, trajectory: Trajectory, prompt: Example) -> Answered:
        start = answer_start(trajectory.tokens[: trajectory.length], self.marker)
        kept = prompt if "supervised" in self.coefficients else None
        return Answered(trajectory, prompt.key, start, kept)

    def example(self, values: Mapping[str, Any]) -> Answered:
        """An answer read back."""
        return Answered.from_dict(values)

    @torch.no_grad()
    def assess(self, prompts: Sequence[Example]) -> Mapping[str, float]:
        """Loss and metrics on the student's greedy answers, on canvases masked at random (see `drawn`); the share of
        answers that ended, and their tokens a pass."""
        found = self.roller.greedy([Request(prompt.key, prompt.prompt_ids) for prompt in prompts])
        answers = [
            self._answered(trajectory_of(prompt.key, prompt.prompt_ids, completion), prompt)
            for prompt, completion in zip(prompts, found, strict=True)
        ]
        sums, weights = Counter[str](), Counter[str]()
        lengths = np.array([self.length(each) for each in answers])
        batches = [
            [answers[row] for row in rows] for rows in sorted_batches(lengths, self.options.train_batch_size)
        ]
        for weight, value in processes.spread(batches, lambda part: list(map(self._validated, part))):
            weights.update(weight)
            sums.update(value)
        means = {name: sums[name] / weights[name] if weights[name] else 0.0 for name in weights}
        loss = sum(factor * means.get(name, 0.0) for name, factor in self.coefficients.items())
        tokens, passes = sum(len(each.token_ids) for each in found), sum(each.passes for each in found)
        finished = float(np.mean([each.finished for each in found]))
        return {"loss": loss, **means, "finished": finished, "tokens_per_pass": tokens / max(passes, 1)}

    def _validated(self, batch: Sequence[Answered]) -> tuple[dict[str, float], dict[str, float]]:
        """Weights and sums of the terms and metrics of some answers."""
        random = generators(self.options.seed, VALIDATION_STEP, [each.key for each in batch])
        unit = self._state(batch, random, drawn).to(self.backbone.device)
        found = self.score_state(self.scorer, unit)
        return unit.weights, {name: float(value) for name, value in found.items()}

    def collate(self, examples: Sequence[Answered]) -> Sequence[Answered]:
        """Answers are padded by `prepare`, unit by unit."""
        return examples

    def length(self, example: Answered) -> int:
        """Prompt once, response twice."""
        return len(example.trajectory.prompt_ids) + 2 * len(example.trajectory.tokens)

    def prepare(self, batch: Sequence[Answered], generators: Sequence[torch.Generator]) -> Units:
        """Draws a canvas for every block of every answer, and lays out what teacher and student read."""
        drafts = [float(torch.rand(1, generator=each)) < self.own.all_mask_share for each in generators]
        units: list[State | Scored] = []
        for draft, canvas_of in ((False, recorded), (True, all_masked)):
            rows = [row for row, own in enumerate(drafts) if own is draft]
            if rows:
                units.append(
                    self._state([batch[row] for row in rows], [generators[row] for row in rows], canvas_of)
                )
        if "supervised" in self.coefficients:
            examples = [answered.example for answered in batch if answered.example is not None]
            traces, eos = collate(examples, self.backbone.pad_id), self.backbone.eos_id
            units.append(traces_of(traces, self.spec, eos, self.own.noise, self._weights, generators))
        return Units(tuple(units))

    def parts(self, batch: Sequence[Answered], generators: Sequence[torch.Generator]) -> list[Units]:
        """One unit a forward pass."""
        return [Units((unit,)) for unit in self.prepare(batch, generators).units]

    @property
    def _weights(self) -> tuple[float, float]:
        """Of a reasoning and of an answer token."""
        return self.options.reasoning_weight, self.options.answer_weight

    def _state(
        self, batch: Sequence[Answered], generators: Sequence[torch.Generator], canvas_of: Callable[..., Any]
    ) -> State:
        trajectories, pad = [answered.trajectory for answered in batch], self.backbone.pad_id
        spec = replace(
            self.spec, block_size=trajectories[0].block_size
        )  # of decoding, at most the trained one
        return state_of(
            reading_of(trajectories, [answered.list_key for answered in batch], pad),
            canvas_of(trajectories, spec, pad, generators),
            [answered.answer_start for answered in batch],
            self._weights,
            ar="ar" in self.coefficients,
        )

    def score(self, model: nn.Module, prepared: Units) -> dict[str, Tensor]:
        """Returns the sums of all terms and metrics; 0 for a term that none of the units has."""
        zero = torch.zeros((), device=prepared.units[0].layout.ids.device)
        sums = dict.fromkeys(self.coefficients, zero)
        for unit in prepared.units:
            if isinstance(unit, State):
                found = self.score_state(model, unit)
            else:
                found = score_slots(model, unit, self.spec.mask_id)
            for name, value in found.items():
                sums[name] = sums.get(name, zero) + value
        return sums

    def score_state(self, model: nn.Module, state: State) -> dict[str, Tensor]:
        """Returns the sums of the terms and metrics of some answers.

        Raises:
            ValueError, FloatingPointError: see `teacher.ask`.
        """
        teacher = ask(self.teacher, state.reading, self.backbone, self.spec, self.own.teacher_top_k)
        layout, masked = state.layout, state.share > 0
        logits = model(layout.ids, layout.positions, layout.allowed, state.rows, state.cols)
        logits[:, self.spec.mask_id] = -torch.inf
        values = divergence(logits, teacher, state.index, self.own.measure, self.spec.mask_id)
        sums = {name: (weight * values).sum() for name, weight in state.terms.items()}
        chosen, found = logits.detach().argmax(dim=1), values.detach()
        return sums | {
            "agreement": (masked & (chosen == teacher.best[state.index])).sum(),
            "reasoning": found[masked & ~state.answer].sum(),
            "answer": found[masked & state.answer].sum(),
        }

    def block_diffusion(self) -> BlockDiffusionSpec:
        """The spec that is saved with the weights."""
        return self.spec

    def settings(self) -> dict[str, Any]:
        """Spec, decoding, what is taught, and the teacher's weights."""
        decoding = asdict(replace(self.roller.options, batch_size=1))
        return {
            "spec": self.spec.to_dict(),
            "decoding": decoding,
            "own": asdict(self.own),
            "teacher": teacher_fingerprint(self.teacher),
        }
