"""A stage's options, the learning rate by step, which weights decay, and the batches of an epoch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.trainer.batches import epoch_batches, generators, process_share, sorted_batches
from recbole_dgr2.trainer.optimizers import parameter_groups
from recbole_dgr2.trainer.options import learning_rate_at
from tests.tiny import tiny_backbone
from tests.training import OPTIONS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", -1),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("train_batch_size", 0),
        ("warmup_ratio", 1.0),
        ("weight_decay", -0.1),
        ("clip_grad_norm", 0.0),
        ("eval_step", -1),
        ("stopping_step", -1),
        ("reasoning_weight", -1.0),
        ("answer_weight", 0.0),
        ("save_step", -1),
        ("seed", -1),
        ("micro_batch_size", -1),
        ("lr_schedule", "step"),
        ("mixed_precision", "fp16"),
    ],
)
def test_bad_option_is_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        replace(OPTIONS, **{name: value})
    assert "\n" not in str(caught.value)


def test_learning_rate_by_hand() -> None:
    options = replace(OPTIONS, learning_rate=1.0, warmup_ratio=0.2, lr_schedule="linear")
    rates = [learning_rate_at(step, 10, options) for step in range(11)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])
    cosine = replace(options, lr_schedule="cosine")
    assert learning_rate_at(6, 10, cosine) == pytest.approx(0.5)
    assert learning_rate_at(10, 10, cosine) == pytest.approx(0.0)
    assert learning_rate_at(0, 1, replace(options, warmup_ratio=0.0)) == 1.0


def test_decay_skips_norms_and_embeddings() -> None:
    model = tiny_backbone().model
    decay, keep = parameter_groups(model.modules(), 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(names[id(p)] for p in decay["params"] + keep["params"]) == sorted(names.values())
    kept = [names[id(parameter)] for parameter in keep["params"]]
    assert all("norm" in name or "embed" in name for name in kept)
    assert not any("norm" in names[id(p)] or "embed" in names[id(p)] for p in decay["params"])
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.1, 0.0)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=200), st.integers(1, 9), st.integers(0, 3))
def test_epoch_holds_every_example_once(lengths: list[int], size: int, epoch: int) -> None:
    batches = epoch_batches(np.array(lengths), size, 3, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    again = epoch_batches(np.array(lengths), size, 3, epoch)
    assert all(np.array_equal(one, two) for one, two in zip(batches, again, strict=True))
    by_length = np.concatenate(sorted_batches(np.array(lengths), size))
    assert sorted(by_length.tolist()) == list(range(len(lengths)))


def test_batches_are_of_like_length_and_differ_between_epochs() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 256)
    first, second = (epoch_batches(lengths, 8, 0, epoch) for epoch in (0, 1))
    assert np.mean([np.ptp(lengths[batch]) for batch in first]) < 12
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


@settings(max_examples=50)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 4))
def test_processes_share_a_batch_exactly(n: int, world: int, micro: int) -> None:
    shares = [process_share(np.arange(n), rank, world, micro) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(np.concatenate([part for share in shares for part in share]).tolist()) == list(range(n))


def test_noise_is_keyed_by_seed_step_and_sample() -> None:
    draw = {
        (seed, step, key): torch.rand(4, generator=generators(seed, step, [5, key])[1]).tolist()
        for seed in (0, 1)
        for step in (-1, 0, 1)
        for key in (0, 1)
    }
    assert len({tuple(values) for values in draw.values()}) == len(draw)
    assert torch.rand(4, generator=generators(1, 0, [1])[0]).tolist() == draw[1, 0, 1]
