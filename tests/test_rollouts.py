"""Rollouts: independent, repeatable samples, groups without variance dropped and redrawn within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.data.ranking import Judgement, RankingJudge
from recbole_dgr2.decode import DecodeOptions
from recbole_dgr2.trainer.rollouts import Groups, Roller, Sampling, draw_groups, figures, sample_key
from tests.rolling import PROMPTS, Invalid, Vowels, converted, decoding, roller


def tokens(rolled: Sequence[Any]) -> list[tuple[int, ...]]:
    return [trajectory.tokens for trajectory, _ in rolled]


@pytest.mark.parametrize("mode", ["block", "autoregressive"])
def test_samples_differ_and_repeat_whatever_the_batch(mode: str) -> None:
    player = roller(mode)
    rolled = player.roll_out(PROMPTS, 4, iteration=2)
    assert len(rolled) == 24 and len({trajectory.key for trajectory, _ in rolled}) == 24
    assert [t.prompt_ids for t, _ in rolled] == [p.prompt_ids for p in PROMPTS for _ in range(4)]
    assert len(set(tokens(rolled[:4]))) > 1
    assert tokens(roller(mode, batch_size=3).roll_out(PROMPTS, 4, 2)) == tokens(rolled)
    assert tokens(player.roll_out(PROMPTS[2:3], 4, 2)) == tokens(rolled[8:12])
    assert tokens(player.roll_out(PROMPTS, 4, 3)) != tokens(rolled)
    assert tokens(roller(mode, seed=8).roll_out(PROMPTS, 4, 2)) != tokens(rolled)
    size = 1 if mode == "autoregressive" else 4
    assert {t.block_size for t, _ in rolled} == {size}
    assert all(finished == (t.tokens[t.length - 1] == 1) for t, finished in rolled)


def test_keys_of_samples_are_far_apart() -> None:
    keys = {
        sample_key(seed, iteration, key, sample)
        for seed in range(3)
        for iteration in range(3)
        for key in (0, 1, 2**62)
        for sample in range(8)
    }
    assert len(keys) == 216 and all(0 <= key < 2**63 for key in keys)


@dataclass(frozen=True)
class OnlyFor:
    """Vowels for some prompts, the same reward for all answers of the others; says which prompts were judged."""

    keys: tuple[int, ...]
    seen: Any

    def __call__(self, key: int, text: str, finished: bool) -> Judgement:
        self.seen.append(key)
        return Vowels()(key, text, finished) if key in self.keys else Judgement(0.5, True, True)


def order_of(iteration: int) -> list[int]:
    """Keys of the prompts in the order in which an iteration takes them."""
    return [PROMPTS[i].key for i in np.random.default_rng([7, iteration]).permutation(len(PROMPTS)).tolist()]


def test_groups_without_variance_are_redrawn() -> None:
    order, seen = order_of(5), list[int]()
    judge = OnlyFor((order[1], order[2], order[4]), seen)
    groups = draw_groups(roller(), judge, PROMPTS, Sampling(2, 4, 3), iteration=5)
    assert list(dict.fromkeys(seen)) == order[:3]  # two at first, one for the dropped one
    assert len(groups.kept) == 2 and len(groups.dropped) == 1
    assert all(len(group) == 4 for group in (*groups.kept, *groups.dropped))
    found = figures(groups)
    assert found["dropped_share"] == pytest.approx(1 / 3) and found["groups"] == 2
    assert found["copied_share"] == pytest.approx(1 / 3) and found["valid_rate"] == 1
    rewards = [answer.judgement.reward for answer in groups.answers]
    assert found["reward"] == pytest.approx(np.mean(rewards)) and len(rewards) == 12


def test_draws_are_bounded_and_all_invalid_groups_go() -> None:
    groups = draw_groups(roller(), Invalid(), PROMPTS, Sampling(2, 2, 2), iteration=0)
    assert len(groups.dropped) == 4 and not groups.kept
    assert figures(groups) == {
        "reward": -1.0,
        "valid_rate": 0.0,
        "copied_share": 0.0,
        "length": pytest.approx(np.mean([a.trajectory.length for a in groups.answers])),
        "dropped_share": 1.0,
        "groups": 0.0,
    }
    every = draw_groups(roller(), Invalid(), PROMPTS, Sampling(4, 2, 9), iteration=0)
    assert len(every.dropped) == len(PROMPTS)  # no prompt comes twice
    once = draw_groups(roller(), Invalid(), PROMPTS, Sampling(2, 2, 1), iteration=0)
    assert len(once.dropped) == 2


def test_an_invalid_answer_stays_in_its_group() -> None:
    @dataclass
    class Sometimes:
        count: int = 0

        def __call__(self, key: int, text: str, finished: bool) -> Judgement:
            self.count += 1
            return Judgement(-1.0, False, False) if self.count % 4 == 0 else Judgement(0.2, True, False)

    groups = draw_groups(roller(), Sometimes(), PROMPTS, Sampling(3, 4, 1), iteration=0)
    assert isinstance(groups, Groups) and len(groups.kept) == 3
    assert [a.judgement.reward for a in groups.kept[0]] == [0.2, 0.2, 0.2, -1.0]


def test_greedy_is_decoded_by_the_same_rule() -> None:
    player = roller()
    completions = player.greedy(PROMPTS)
    assert [c.key for c in completions] == [p.key for p in PROMPTS]
    assert {(c.trace.temperature, c.trace.tau, c.trace.block_size) for c in completions} == {(0.0, 0.02, 4)}
    assert completions == player.greedy(PROMPTS)
    eos = player.backbone.eos_id
    assert player.text((*player.backbone.tokenizer("base coat")["input_ids"], eos)) == "base coat"


def test_what_cannot_be_replayed_is_refused() -> None:
    backbone, spec = converted()
    for changed, message in (
        ({"temperature": 0.0}, "temperature 0.0, expected above 0"),
        ({"mode": "speculative"}, "mode 'speculative'"),
        ({"mode": "auto"}, "mode 'auto'"),
        ({"label_ids": (3, 4)}, "label_ids"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            Roller(backbone, spec, decoding(**changed))
        assert "\n" not in str(caught.value)
    for sampling in ({"groups": 0}, {"samples": 1}, {"max_draws": 0}):
        with pytest.raises(ValueError, match=next(iter(sampling))):
            replace(Sampling(2, 2, 2), **sampling)


def test_decoding_cuts_no_distribution() -> None:
    """Replay scores the whole distribution: an option that samples from a part of it must be refused by `Roller`."""
    names = {field.name for field in fields(DecodeOptions)}
    assert not names & {"top_p", "top_k", "min_p", "typical_p"}


@pytest.mark.parametrize("conditional", [True, False])
def test_ranking_judge_by_hand(conditional: bool) -> None:
    judge = RankingJudge({7: (2, 4), 8: (0, 4)}, conditional)

    def answer(*labels: int) -> str:
        listed = ",".join(f'"<c{label}>"' for label in labels)
        return f'so {{"explanation": "x", "recommendations": [{listed}]}}'

    def judged(key: int, text: str, finished: bool = True) -> tuple[float, bool, bool]:
        found = judge(key, text, finished)
        return round(found.reward, 9), found.valid, found.copied

    bonus = 0.0 if conditional else 0.2
    assert judged(7, answer(3, 1, 2, 4)) == (0.7, True, False)
    assert judged(7, answer(1, 2, 3, 4)) == (bonus, True, True)
    assert judged(7, answer(1, 2, 4, 3)) == (round(bonus - 0.25, 9), True, False)
    assert judged(8, answer(1, 2, 3, 4)) == (0.2, True, True)
    assert judged(8, answer(2, 1, 3, 4)) == (round(bonus - 0.25, 9), True, False)
    assert judged(7, answer(3, 1, 2, 4), False) == (-1.0, False, False)
    assert judged(7, answer(1, 1, 2, 4)) == (-1.0, False, False)
    assert judged(7, "nothing") == (-1.0, False, False)
