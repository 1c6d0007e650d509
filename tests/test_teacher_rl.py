"""DAPO of the autoregressive teacher: no canvas, wider clip above, and the reward hack that the condition closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from recbole_dgr2.data.ranking import reward
from recbole_dgr2.trainer.batches import generators
from recbole_dgr2.trainer.graded import PolicyOptions, Practice, Replayed
from recbole_dgr2.trainer.rollouts import Sampling
from recbole_dgr2.trainer.teacher_rl import TeacherRL
from tests.rolling import EAGER, POLICY, PROMPTS, Vowels, assert_resumes, assert_reward_rises, make, roller


def test_every_token_is_scored_in_the_clean_stream() -> None:
    stage = make(TeacherRL, "autoregressive")
    material = stage.collect(PROMPTS, 0)
    assert material.metrics["replay_gap_max"] < 1e-5
    random = generators(7, 0, [graded.key for graded in material.examples])
    parts = stage.parts(material.examples, random)
    assert len(parts) == 2  # the replay, whole, and the lessons
    replayed = parts[0]
    assert isinstance(replayed, Replayed)
    width = max(len(p.prompt_ids) for p in PROMPTS) + 10
    assert replayed.replay.layout.ids.shape[1] <= width and set(replayed.replay.copies.tolist()) == {-1}
    assert len(replayed.old) == sum(graded.trajectory.length for graded in material.examples)
    assert stage.block_diffusion() is None


@pytest.mark.parametrize(("death", "again"), [({"lives": 2}, [1]), ({"draws": 2}, [1])])
def test_killed_and_resumed_is_the_unbroken_run(
    death: dict[str, int], again: list[int], tmp_path: Path
) -> None:
    assert_resumes(TeacherRL, "autoregressive", death, again, tmp_path)


def test_reward_rises(tmp_path: Path) -> None:
    own = PolicyOptions(Sampling(4, 8, 1), 0.2, 0.28)
    stage = TeacherRL(roller("autoregressive", max_new_tokens=8), EAGER, {}, Practice(Vowels()), own)
    info = assert_reward_rises(stage, tmp_path / "ar_teacher_rl")
    assert (info.stage, info.parent, info.block_diffusion) == ("ar_teacher_rl", "ar_teacher", None)


def test_copying_the_input_order_pays_only_without_the_condition() -> None:
    """Over targets in every slot: the ablation pays more for copying than for a shuffle, the condition does not."""
    for conditional, copied in ((True, 0.2 / 10), (False, 0.2)):
        values = [reward(slot, slot, 10, True, conditional_bonus=conditional) for slot in range(10)]
        assert sum(values) / 10 == pytest.approx(copied)


def test_block_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 'autoregressive'"):
        make(TeacherRL, "block", own=POLICY)
