"""Rollouts: what the present weights answer, decoded in batches by the real rule and recorded for replay.

Samples are drawn from the model's own distribution at a temperature. Nothing cuts that distribution (no top-p, no
top-k): replay would score a token under another one than it was drawn from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from recbole_dgr2.data.ranking import Judgement
from recbole_dgr2.decode.engine import decode
from recbole_dgr2.decode.types import Completion, DecodeOptions, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.objectives import has_signal
from recbole_dgr2.model.replay import Trajectory
from recbole_dgr2.system import processes

ROLLOUT_MODES = ("autoregressive", "block")


Judge = Callable[[int, str, bool], Judgement]
"""From a prompt's key, the response as text, and whether it was ended within the token limit."""


@dataclass(frozen=True)
class Answer:
    """A rollout and its judgement; `finished`: it was ended within the token limit."""

    trajectory: Trajectory
    finished: bool
    judgement: Judgement


@dataclass(frozen=True)
class Sampling:
    """How groups of answers are drawn.

    groups: prompts an iteration is to learn from, >= 1. samples: answers a prompt (G), >= 2. max_draws: most prompts
    that may be rolled out for each group that is to be kept, >= 1; 1 draws no prompt for a dropped one.
    """

    groups: int
    samples: int
    max_draws: int

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("samples", 2), ("max_draws", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected an integer >= {least}")


@dataclass(frozen=True)
class Groups:
    """Groups of `samples` answers: `kept` have rewards that differ, `dropped` teach nothing."""

    kept: tuple[tuple[Answer, ...], ...]
    dropped: tuple[tuple[Answer, ...], ...]

    @property
    def answers(self) -> list[Answer]:
        """All answers that were drawn."""
        return [answer for group in (*self.kept, *self.dropped) for answer in group]


@dataclass(frozen=True)
class Roller:
    """Rolls prompts out with a model's present weights.

    options: of decoding; mode "autoregressive" or "block", temperature above 0. spec: None for a plain autoregressive
    model. Raises ValueError for options that cannot be replayed.
    """

    backbone: Backbone
    spec: BlockDiffusionSpec | None
    options: DecodeOptions

    def __post_init__(self) -> None:
        options = self.options
        if options.mode not in ROLLOUT_MODES:
            raise ValueError(f"rollouts: mode {options.mode!r}, expected one of {', '.join(ROLLOUT_MODES)}")
        if options.temperature <= 0:
            raise ValueError(
                f"rollouts: temperature {options.temperature}, expected above 0: greedy samples of a prompt are equal"
            )
        if options.label_ids:
            raise ValueError("rollouts: label_ids assign labels after decoding, which cannot be replayed")

    def roll_out(
        self, prompts: Sequence[Request], samples: int, iteration: int
    ) -> list[tuple[Trajectory, bool]]:
        """`samples` answers of each prompt, one prompt after the other, each with whether it ended in time.

        The random numbers of a sample are keyed by (seed, iteration, prompt key, sample) and by nothing else.
        """
        seed = self.options.seed
        requests = [
            Request(sample_key(seed, iteration, prompt.key, sample), prompt.prompt_ids)
            for prompt in prompts
            for sample in range(samples)
        ]
        found = self.complete(requests, self.options)
        return [
            (trajectory_of(request.key, request.prompt_ids, completion), completion.finished)
            for request, completion in zip(requests, found, strict=True)
        ]

    def greedy(self, prompts: Sequence[Request]) -> Sequence[Completion]:
        """One greedy completion of each prompt, decoded by the same rule: what validation judges."""
        return self.complete(prompts, replace(self.options, temperature=0.0))

    def complete(self, requests: Sequence[Request], options: DecodeOptions) -> Sequence[Completion]:
        """Completions of requests with the present weights, shared out over the processes."""
        model, eos_id = self.backbone.model, self.backbone.eos_id

        def work(part: Sequence[Request]) -> Sequence[Completion]:
            return decode(model, part, options, eos_id=eos_id, spec=self.spec).completions

        return processes.spread(requests, work)

    def text(self, token_ids: Sequence[int]) -> str:
        """A response as text, without the end-of-sequence token."""
        kept = [token for token in token_ids if token != self.backbone.eos_id]
        return str(self.backbone.tokenizer.decode(kept))


def draw_groups(
    roller: Roller, judge: Judge, prompts: Sequence[Request], sampling: Sampling, iteration: int
) -> Groups:
    """Rolls prompts out until `sampling.groups` groups have rewards that differ, or enough prompts were tried.

    Dynamic sampling of DAPO (arXiv 2503.14476): a group whose rewards are all equal is dropped and another prompt is
    drawn for it. Prompts come in an order that is drawn anew for each iteration; at most `groups * max_draws` of them
    are rolled out. Invalid and overlong answers stay in their group.
    """
    order = np.random.default_rng([roller.options.seed, iteration]).permutation(len(prompts))
    left = iter(order[: sampling.groups * sampling.max_draws].tolist())
    kept: list[tuple[Answer, ...]] = []
    dropped: list[tuple[Answer, ...]] = []
    while drawn := [prompts[index] for index in _take(left, sampling.groups - len(kept))]:
        for group in _judged(roller, judge, drawn, sampling.samples, iteration):
            rewards = torch.tensor([[answer.judgement.reward for answer in group]], dtype=torch.float64)
            (kept if bool(has_signal(rewards)) else dropped).append(group)
    return Groups(tuple(kept), tuple(dropped))


def _take(left: Iterator[int], count: int) -> list[int]:
    return [index for _, index in zip(range(count), left, strict=False)]


def _judged(
    roller: Roller, judge: Judge, prompts: Sequence[Request], samples: int, iteration: int
) -> Iterator[tuple[Answer, ...]]:
    rolled = iter(roller.roll_out(prompts, samples, iteration))
    for prompt in prompts:
        group = []
        for _, (trajectory, finished) in zip(range(samples), rolled, strict=False):
            text = roller.text(trajectory.tokens[: trajectory.length])
            group.append(Answer(trajectory, finished, judge(prompt.key, text, finished)))
        yield tuple(group)


def figures(groups: Groups) -> dict[str, float]:
    """What is logged of an iteration's rollouts, over all that were drawn.

    reward: mean. valid_rate: of raw answers. copied_share: that repeat the input order. length: mean tokens up to the
    end. dropped_share: of groups, for want of variance. groups: that are learnt from.
    """
    answers = groups.answers
    judged = [answer.judgement for answer in answers]
    drawn = len(groups.kept) + len(groups.dropped)
    return {
        "reward": float(np.mean([each.reward for each in judged])),
        "valid_rate": float(np.mean([each.valid for each in judged])),
        "copied_share": float(np.mean([each.copied for each in judged])),
        "length": float(np.mean([answer.trajectory.length for answer in answers])),
        "dropped_share": len(groups.dropped) / drawn,
        "groups": float(len(groups.kept)),
    }


def sample_key(seed: int, iteration: int, key: int, sample: int) -> int:
    """63 well mixed bits that name one sample; equal arguments give equal keys."""
    text = f"{seed},{iteration},{key},{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def trajectory_of(key: int, prompt_ids: tuple[int, ...], completion: Completion) -> Trajectory:
    """What a decoder recorded of one completion; `key` replaces the request's.

    Raises ValueError when the completion's own tokens are not those of its trace (labels assigned afterwards).
    """
    trace, length = completion.trace, len(completion.token_ids)
    if trace.tokens[:length] != completion.token_ids:
        raise ValueError(
            f"trajectory {key}: label_ids changed the answer after decoding; decode without them"
        )
    return Trajectory(
        key=key,
        prompt_ids=prompt_ids,
        tokens=trace.tokens,
        steps=trace.steps,
        log_probs=trace.log_probs,
        block_size=trace.block_size,
        tau=trace.tau,
        temperature=trace.temperature,
        length=length,
    )
