"""The synchronised loop is the same decoder as `block`, only slower: nothing else may differ in a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.decode.synchronised import synchronised
from recbole_dgr2.model.block_diffusion import Context
from tests.decoding import SPEC, assert_same, options_of, requests_of, run
from tests.tiny import EOS_ID, tiny_model


@pytest.mark.parametrize("context", ["causal", "block"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_answers_are_those_of_rows_on_their_own(context: Context, batch: int) -> None:
    spec = replace(SPEC, context=context)
    requests = requests_of([5, 11, 3, 8, 7])
    options = options_of(batch_size=batch, max_new_tokens=40)
    wanted = run(requests, options, spec=spec)
    got = synchronised(tiny_model(), requests, options, EOS_ID, spec)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in wanted.completions]
    assert got.completions[0].trace.steps == wanted.completions[0].trace.steps


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    limit=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_any_lengths_and_limits(lengths: list[int], limit: int, seed: int) -> None:
    requests = requests_of(lengths, seed)
    options = options_of(batch_size=4, max_new_tokens=limit, block_size=4)
    got = synchronised(tiny_model(), requests, options, EOS_ID, SPEC)
    wanted = run(requests, options)
    assert [(c.key, c.token_ids, c.finished) for c in got.completions] == [
        (c.key, c.token_ids, c.finished) for c in wanted.completions
    ]


def test_alone_it_is_block_pass_by_pass() -> None:
    requests = requests_of([9])
    options = options_of(batch_size=1, max_new_tokens=30)
    got = synchronised(tiny_model(), requests, options, EOS_ID, SPEC)
    assert_same(got.completions, run(requests, options).completions)
