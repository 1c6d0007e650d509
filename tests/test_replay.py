"""Replay: the log-probability of a token on the canvas that the decoder saw, the same to 1e-5 as at the rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from recbole_dgr2.decode import decode
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.model.replay import (
    Replay,
    Trajectory,
    replay_all,
    replay_chunks,
    replay_copies,
    replay_one,
    replayed_log_probs,
    replayed_logits,
)
from recbole_dgr2.trainer.rollouts import trajectory_of
from tests.decoding import SPEC, options_of, requests_of
from tests.tiny import ARCHITECTURES, EOS_ID, MASK_ID, VOCAB, row_generators, tiny_model

PROMPTS = [5, 9, 3, 7, 6, 8]


def roll_out(
    architecture: str = "qwen3", spec: BlockDiffusionSpec = SPEC, eos_id: int = EOS_ID, **options: Any
) -> list[Trajectory]:
    """Trajectories of the tiny random model on ragged prompts."""
    requests = requests_of(PROMPTS)
    chosen = options_of(**{"temperature": 0.8, "max_new_tokens": 21, **options})
    result = decode(tiny_model(architecture), requests, chosen, eos_id=eos_id, spec=spec)
    return [
        trajectory_of(request.key, request.prompt_ids, completion)
        for request, completion in zip(requests, result.completions, strict=True)
    ]


def ending_early(architecture: str, spec: BlockDiffusionSpec) -> tuple[list[Trajectory], int]:
    """Trajectories some of which end inside a block, with later slots of that block committed; and their EOS."""
    for eos_id in range(2, 80):
        found = roll_out(architecture, spec, eos_id)
        if sum(after_the_end(trajectory) > 0 for trajectory in found) >= 2:
            return found, eos_id
    raise AssertionError("no end of sequence in mid-block; change the prompts")


def after_the_end(trajectory: Trajectory) -> int:
    """Slots that were committed after the end of the sequence; 0 where it was not reached."""
    return sum(step >= 0 for step in trajectory.steps[trajectory.length :]) * (trajectory.length < 21)


def recorded(trajectories: Sequence[Trajectory], replay: Replay) -> torch.Tensor:
    pairs = zip(replay.rows.tolist(), replay.slots.tolist(), strict=True)
    return torch.tensor([trajectories[row].log_probs[slot] for row, slot in pairs])


def assert_replayed(
    architecture: str, trajectories: Sequence[Trajectory], replay: Replay, mask_id: int | None = MASK_ID
) -> None:
    with torch.no_grad():
        found = replayed_log_probs(TokenScorer(tiny_model(architecture)), replay, mask_id)
    torch.testing.assert_close(found, recorded(trajectories, replay), rtol=0, atol=1e-5)


def scored_slots(replay: Replay) -> list[tuple[int, int]]:
    return list(zip(replay.rows.tolist(), replay.slots.tolist(), strict=True))


@pytest.mark.parametrize("context", ["causal", "block"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replayed_is_rolled_out(architecture: str, context: Any) -> None:
    spec = replace(SPEC, context=context)
    trajectories, _ = ending_early(architecture, spec)
    whole = replay_all(trajectories, spec, pad_id=0)
    assert len({t.passes for t in trajectories}) > 1 and max(t.passes for t in trajectories) > 2
    committed = [(i, k) for i, t in enumerate(trajectories) for k, step in enumerate(t.steps) if step >= 0]
    assert sorted(scored_slots(whole)) == committed
    assert_replayed(architecture, trajectories, whole)
    for trajectory in trajectories:
        assert_replayed(architecture, [trajectory], replay_all([trajectory], spec, pad_id=5))


@pytest.mark.parametrize("max_copies", [1, 2, 3, 100])
def test_chunks_score_every_slot_once_and_alike(max_copies: int) -> None:
    trajectories, _ = ending_early("qwen3", SPEC)
    scored = []
    for kept, copies in replay_chunks(trajectories, max_copies):
        part = [trajectories[index] for index in kept]
        replay = replay_copies(part, SPEC, 0, copies)
        assert len(copies) <= max_copies
        assert replay.layout.ids.shape[1] <= 9 + 24 * (1 + max_copies)
        assert_replayed("qwen3", part, replay)
        scored += [(kept[row], slot) for row, slot in scored_slots(replay)]
        assert {row for row, _ in scored_slots(replay)} == set(range(len(kept)))
    assert sorted(scored) == sorted(scored_slots(replay_all(trajectories, SPEC, 0)))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_any_temperature_and_a_shorter_block(temperature: float) -> None:
    trajectories = roll_out(temperature=temperature, block_size=4)
    assert {t.block_size for t in trajectories} == {4}
    assert_replayed("qwen3", trajectories, replay_all(trajectories, SPEC, 0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_autoregressive_trajectories_need_no_copy(architecture: str) -> None:
    trajectories = roll_out(architecture, mode="autoregressive")
    replay = replay_all(trajectories, SPEC, 0)
    assert replay.layout.source.shape[1] == 0 and set(replay.copies.tolist()) == {-1}
    assert replay_chunks(trajectories, 4) == [(tuple(range(6)), range(0))]
    assert_replayed(architecture, trajectories, replay)


def test_a_plain_model_is_replayed_without_a_spec() -> None:
    requests = requests_of(PROMPTS)
    options = options_of("autoregressive", temperature=0.7)
    result = decode(tiny_model(), requests, options, eos_id=EOS_ID)
    trajectories = [
        trajectory_of(r.key, r.prompt_ids, c) for r, c in zip(requests, result.completions, strict=True)
    ]
    assert_replayed("qwen3", trajectories, replay_all(trajectories, None, 0), mask_id=None)


def test_a_random_model_cannot_know_the_answer() -> None:
    """A leak (the token itself in sight) would show as a far higher probability than chance."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.2)
    requests = requests_of(PROMPTS)
    options = options_of("block", temperature=1.0, max_new_tokens=24, tau=0.011)
    result = decode(model, requests, options, eos_id=EOS_ID, spec=SPEC)
    trajectories = [
        trajectory_of(r.key, r.prompt_ids, c) for r, c in zip(requests, result.completions, strict=True)
    ]
    with torch.no_grad():
        found = replayed_log_probs(TokenScorer(model), replay_all(trajectories, SPEC, 0), MASK_ID)
    assert float(found.mean()) == pytest.approx(-math.log(VOCAB), abs=0.1)
    assert float(found.max()) < -math.log(VOCAB) + 0.5


def test_tokens_after_the_end_are_context_and_do_not_count() -> None:
    trajectories, eos_id = ending_early("qwen3", SPEC)
    replay = replay_all(trajectories, SPEC, 0)
    for row, slot, counted in zip(
        replay.rows.tolist(), replay.slots.tolist(), replay.counted.tolist(), strict=True
    ):
        assert counted == (slot < trajectories[row].length)
    ended, later = next(
        (t, slot)
        for t in trajectories
        for slot in range(t.length, len(t.steps) * bool(after_the_end(t)))
        if 1 <= t.steps[slot] < max(t.steps[-8:])
    )
    assert ended.tokens[ended.length - 1] == eos_id
    tokens = list(ended.tokens)
    tokens[later] = tokens[later] % 80 + 2
    other = replace(ended, tokens=tuple(tokens))
    scorer = TokenScorer(tiny_model())
    with torch.no_grad():
        one, two = (replayed_log_probs(scorer, replay_all([t], SPEC, 0), MASK_ID) for t in (ended, other))
    before = replay_all([ended], SPEC, 0)
    shown = torch.tensor([ended.steps[slot] > ended.steps[later] for slot in before.slots.tolist()])
    same_block = before.slots // 8 == later // 8
    assert not torch.allclose(one[shown & same_block], two[shown & same_block], atol=1e-4)
    torch.testing.assert_close(one[~shown & (before.slots != later)], two[~shown & (before.slots != later)])


def test_one_state_is_one_that_the_decoder_visited() -> None:
    trajectories, _ = ending_early("qwen3", SPEC)
    seen: set[tuple[int, int, int]] = set()
    for draw in range(40):
        replay = replay_one(trajectories, SPEC, 0, row_generators([draw * 10 + i for i in range(6)]))
        assert replay.layout.source.shape[1] == 1 and set(replay.copies.tolist()) <= {0}
        for row, trajectory in enumerate(trajectories):
            for begin in range(0, len(trajectory.tokens), 8):
                steps = trajectory.steps[begin : begin + 8]
                scored = {s - begin for r, s in scored_slots(replay) if r == row and 0 <= s - begin < 8}
                states = [{k for k, step in enumerate(steps) if step >= s} for s in range(1, max(steps) + 1)]
                assert scored in states or (not states and not scored)
                seen.add((row, begin, len(scored)))
    blocks = sum(max(t.steps[b : b + 8]) for t in trajectories for b in range(0, len(t.steps), 8))
    assert len(seen) == blocks  # every pass of every block is drawn now and then


def test_one_state_is_scored_as_in_the_full_replay() -> None:
    """The tokens of the drawn pass itself have the rollout's log-probability."""
    trajectories, _ = ending_early("qwen3", SPEC)
    replay = replay_one(trajectories, SPEC, 0, row_generators([*range(6)]))
    with torch.no_grad():
        found = replayed_log_probs(TokenScorer(tiny_model()), replay, MASK_ID)
    first: dict[tuple[int, int], int] = {}
    for row, slot in scored_slots(replay):
        step = trajectories[row].steps[slot]
        first[row, slot // 8] = min(step, first.get((row, slot // 8), step))
    own = torch.tensor([trajectories[r].steps[s] == first[r, s // 8] for r, s in scored_slots(replay)])
    torch.testing.assert_close(found[own], recorded(trajectories, replay)[own], rtol=0, atol=1e-5)
    assert not torch.allclose(found[~own], recorded(trajectories, replay)[~own], atol=1e-3)


def test_draws_of_a_row_do_not_depend_on_its_neighbours() -> None:
    trajectories, _ = ending_early("qwen3", SPEC)
    together = replay_one(trajectories, SPEC, 0, row_generators([*range(6)]))
    alone = replay_one(trajectories[2:3], SPEC, 0, row_generators([2]))
    of_row = [slot for row, slot in scored_slots(together) if row == 2]
    assert of_row == [slot for _, slot in scored_slots(alone)]


def test_gradient_of_chunks_adds_up() -> None:
    trajectories = roll_out()
    model = tiny_model()
    scorer = TokenScorer(model)
    replayed_log_probs(scorer, replay_all(trajectories, SPEC, 0), MASK_ID).sum().backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for kept, copies in replay_chunks(trajectories, 2):
        part = replay_copies([trajectories[index] for index in kept], SPEC, 0, copies)
        replayed_log_probs(scorer, part, MASK_ID).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-3, atol=1e-4)


def test_the_mask_token_is_never_scored() -> None:
    replay = replay_all(roll_out(), SPEC, 0)
    with torch.no_grad():
        logits = replayed_logits(TokenScorer(tiny_model()), replay, MASK_ID)
    assert bool((logits[:, MASK_ID] == -torch.inf).all())


GOOD = {
    "key": 1,
    "prompt_ids": (3,),
    "tokens": (4, 5, 6, 7),
    "steps": (0, 1, 0, -1),
    "log_probs": (-1.0, -1.0, -1.0, 0.0),
    "block_size": 2,
    "tau": 0.9,
    "temperature": 1.0,
    "length": 3,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": -1}, "key >= 0"),
        ({"prompt_ids": ()}, "at least one prompt token"),
        ({"steps": (0, 1, 0)}, "as many of each"),
        ({"block_size": 3}, "whole blocks of 3"),
        ({"length": 4}, "no masked slot within"),
        ({"length": 0}, "expected 1..4"),
        ({"steps": (0, 1, 1, -1)}, "step 0 at slots"),
        ({"steps": (0, 0, 0, -1)}, "step 0 at slots"),
    ],
)
def test_bad_trajectory_is_one_line(changed: dict[str, Any], message: str) -> None:
    Trajectory(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) as caught:
        Trajectory(**{**GOOD, **changed})
    assert "\n" not in str(caught.value)


def test_what_cannot_share_a_batch_is_refused() -> None:
    good = Trajectory(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of these alone"):
        replay_all([good, replace(good, temperature=0.5)], SPEC, 0)
    with pytest.raises(ValueError, match="without a block-diffusion spec"):
        replay_all([good], None, 0)
    with pytest.raises(ValueError, match="max_copies"):
        replay_chunks([good], 0)


def test_labels_assigned_afterwards_cannot_be_replayed() -> None:
    requests = requests_of([5])
    options = options_of("block", temperature=0.0)
    completion = decode(tiny_model(), requests, options, eos_id=EOS_ID, spec=SPEC).completions[0]
    changed = replace(completion, token_ids=(completion.token_ids[0] + 1, *completion.token_ids[1:]))
    with pytest.raises(ValueError, match="label_ids"):
        trajectory_of(1, requests[0].prompt_ids, changed)


def test_idle_canvases_are_left_out() -> None:
    """A block takes part in as many copies as it had passes, however many another block of the batch had."""
    trajectories, _ = ending_early("qwen3", SPEC)
    replay = replay_all(trajectories, SPEC, 0)
    passes = [[max(t.steps[b : b + 8]) for b in range(0, len(t.steps), 8)] for t in trajectories]
    slots = max(len(t.tokens) for t in trajectories)
    assert replay.layout.ids.shape[1] == max(PROMPTS) + slots + max(8 * sum(row) for row in passes)
    assert replay.layout.ids.shape[1] < max(PROMPTS) + slots * (1 + max(map(max, passes)))
