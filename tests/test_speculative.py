"""Speculative decoding: the output is autoregressive, token for token, whatever is drafted; and its passes by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from recbole_dgr2.decode import Completion, Request, decode, engine
from recbole_dgr2.decode.speculative import Speculative, _Row, expected_to_stand, worth_verifying
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from tests.decoding import options_of, requests_of, run
from tests.tiny import ARCHITECTURES, EOS_ID, MASK_ID, VOCAB, tiny_model

LENGTHS = (5, 11, 3, 8, 3, 17, 1)
SURE = 12.0


def assert_equal_output(got: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    """Tokens, ends and the trace of autoregressive decoding."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.key, a.token_ids, a.finished) == (b.key, b.token_ids, b.finished)
        assert (a.trace.tokens, a.trace.steps, a.trace.block_size) == (b.trace.tokens, b.trace.steps, 1)
        assert a.trace.log_probs == pytest.approx(b.trace.log_probs, abs=1e-5)
        assert a.trace.confidences == pytest.approx(b.trace.confidences, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_autoregressive(architecture: str, block_size: int, temperature: float) -> None:
    requests = requests_of(LENGTHS)
    free = run(requests, options_of("autoregressive", temperature=temperature), architecture).completions
    for eos_id in (-1, free[1].token_ids[len(free[1].token_ids) // 3], free[2].token_ids[-1]):
        wanted = run(
            requests, options_of("autoregressive", temperature=temperature), architecture, eos_id=eos_id
        )
        options = options_of("speculative", 3, block_size=block_size, temperature=temperature)
        got = run(requests, options, architecture, eos_id=eos_id)
        assert_equal_output(got.completions, wanted.completions)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    batch_size=st.integers(1, 7),
    block_size=st.integers(1, 8),
    limit=st.integers(1, 30),
    token_cost=st.sampled_from([1e-4, 0.02, 1.0]),
    eos_id=st.integers(2, 12),
)
def test_any_requests_give_the_autoregressive_output(
    lengths: list[int], batch_size: int, block_size: int, limit: int, token_cost: float, eos_id: int
) -> None:
    requests = requests_of(lengths, seed=sum(lengths))
    wanted = run(requests, options_of("autoregressive", batch_size, limit), eos_id=eos_id).completions
    options = options_of("speculative", batch_size, limit, block_size=block_size, token_cost=token_cost)
    got = run(requests, options, eos_id=eos_id).completions
    assert_equal_output(got, wanted)
    assert all(MASK_ID not in completion.token_ids for completion in got)
    for completion in got:
        assert completion.passes <= 2 * len(completion.token_ids)
        assert_statistics(completion)


def assert_statistics(completion: Completion) -> None:
    """Each verifying pass gives what stands and one token more, but for a canvas that goes on from a hit."""
    stats, tokens = completion.speculation, len(completion.token_ids)
    assert stats is not None
    assert len(stats.checked) == len(stats.accepted) == len(stats.queries) == completion.passes
    assert all(0 <= a <= c <= q for a, c, q in zip(stats.accepted, stats.checked, stats.queries, strict=True))
    by_pass = Counter(completion.trace.passes)
    assert by_pass[0] == 1
    assert sum(by_pass.values()) == tokens
    for at, (accepted, checked) in enumerate(zip(stats.accepted, stats.checked, strict=True), start=1):
        last = at == completion.passes  # cut at the end of the sequence or at the limit
        assert by_pass[at] in (accepted, accepted + 1) or (last and by_pass[at] <= accepted + 1), checked


def draft_model(
    monkeypatch: pytest.MonkeyPatch, prompt_length: int, tokens: Sequence[int], wrong: Mapping[int, int]
) -> list[int]:
    """Causal queries predict tokens[slot]; canvas queries do too, but wrong[slot] where there is one. Widths noted."""
    widths: list[int] = []

    def forward(
        model: Any,
        ids: Tensor,
        positions: Tensor,
        allowed: Tensor | None,
        cache: Any,
        rows: Tensor,
        cols: Tensor,
    ) -> Tensor:
        widths.append(ids.shape[1])
        logits = torch.zeros(len(rows), VOCAB)
        for index, (row, col) in enumerate(zip(rows.tolist(), cols.tolist(), strict=True)):
            place = int(positions[row, col])
            seen = place + 1 if allowed is None and ids.shape[1] == 1 else -1
            seen = seen if allowed is None else int(allowed[row, col].sum())
            slot = place + 1 - prompt_length
            token = tokens[slot] if slot < len(tokens) else 2
            logits[index, token if seen == place + 1 else wrong.get(slot, token)] = SURE
        return logits

    monkeypatch.setattr(engine, "forward_cached", forward)
    return widths


def test_passes_when_all_drafts_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*range(20, 40), EOS_ID]
    widths = draft_model(monkeypatch, 4, tokens, {})
    (got,) = run(requests_of([4]), options_of("speculative", block_size=6, max_new_tokens=64)).completions
    assert got.token_ids == tuple(tokens)
    # prefill 20; draft 21-25; verify those and draft 26-30 behind 25; ...; the last draft ends with the end token
    assert widths == [4, 6, 5 + 6, 5 + 6, 5 + 6, 5]
    assert got.passes == 5
    assert got.trace.passes == (0, *[2] * 5, *[3] * 5, *[4] * 5, *[5] * 5)
    assert got.speculation is not None
    assert (got.speculation.checked, got.speculation.accepted) == ((0, 5, 5, 5, 4), (0, 5, 5, 5, 4))


def test_a_wrong_draft_is_corrected_and_the_rest_is_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*range(20, 32), EOS_ID]
    draft_model(monkeypatch, 4, tokens, {3: 77})
    (got,) = run(requests_of([4]), options_of("speculative", block_size=6, max_new_tokens=64)).completions
    assert got.token_ids == tuple(tokens)
    assert got.trace.passes[:9] == (0, 2, 2, 2, 3, 3, 3, 3, 3)
    assert got.speculation is not None
    # 21 and 22 stand, 23 is the correction; then 24 and 25, and 26 to 29 of the canvas that began with 25
    assert got.speculation.accepted[:3] == (0, 2, 6)


def test_drafts_beyond_the_limit_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = draft_model(monkeypatch, 4, list(range(20, 60)), {})
    (got,) = run(requests_of([4]), options_of("speculative", block_size=8, max_new_tokens=5)).completions
    assert (got.token_ids, got.finished) == ((20, 21, 22, 23, 24), False)
    assert widths == [4, 8, 4]


def exact_pairs(model: Any, prompt: tuple[int, ...], mask_id: int) -> np.ndarray:
    """Probability of each (second, third) token given the first, and of the first: [V, V, V]."""

    def following(ids: list[list[int]]) -> Tensor:
        logits = model(input_ids=torch.tensor(ids)).logits[:, -1].double()
        logits[:, mask_id] = -torch.inf
        return logits.softmax(dim=-1)

    size = model.config.vocab_size
    with torch.no_grad():
        first = following([list(prompt)])[0]
        second = following([[*prompt, a] for a in range(size)])
        third = following([[*prompt, a, b] for a in range(size) for b in range(size)]).view(size, size, size)
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def test_samples_follow_the_autoregressive_distribution() -> None:
    model, mask_id, count = tiny_model(vocab_size=6), 5, 3000
    prompt = (1, 3, 2)
    requests = [Request(key, prompt) for key in range(count)]
    options = options_of("speculative", 64, 3, temperature=1.0, block_size=3, seed=1)
    spec = BlockDiffusionSpec(4, mask_id, "causal")
    result = decode(model, requests, options, eos_id=-1, spec=spec)
    assert result.tokens_per_forward > 1.0  # some drafts stood
    assert 0.1 < result.acceptance_rate < 1.0  # and some fell
    found = np.zeros((6, 6, 6))
    for completion in result.completions:
        found[completion.token_ids] += 1
    wanted = count * exact_pairs(model, prompt, mask_id)
    likely = wanted >= 5
    statistic = float(((found - wanted)[likely] ** 2 / wanted[likely]).sum())
    assert statistic < chi2.ppf(0.9999, int(likely.sum()) - 1)
    assert found[:, :, mask_id].sum() == found[:, mask_id].sum() == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            None,
            "mode 'speculative' needs a model converted to block diffusion: run the conversion stage first",
        ),
        (
            BlockDiffusionSpec(8, MASK_ID, "block"),
            "mode 'speculative' needs .* context 'causal', got 'block'",
        ),
    ],
)
def test_a_model_without_causal_blocks_is_refused(spec: BlockDiffusionSpec | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        decode(tiny_model(), requests_of([3]), options_of("speculative"), eos_id=EOS_ID, spec=spec)
    assert "\n" not in str(error.value)


def test_longer_drafts_are_verified_the_surer_and_the_cheaper_they_are() -> None:
    assert worth_verifying([], 0.02, 8) == 1
    assert worth_verifying([1.0] * 7, 0.02, 8) == 8
    assert worth_verifying([1.0, 0.5, 0.01, 1.0], 0.02, 8) == 3  # by hand: .005 * (58 + 3) < 2.5
    assert worth_verifying([0.9] * 30, 0.01, 32) > worth_verifying([0.9] * 30, 0.5, 32)
    # by hand, fixed cost 1 / .5 + 2 = 4: gains 1; .5 * 5 >= 1; .25 * 6 = 1.5 >= 1.5; .125 * 7 < 1.75
    assert worth_verifying([0.5] * 5, 0.5, 2) == 3


def test_worth_verifying_maximises_the_rate() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        sure = generator.uniform(0.2, 1.0, size=int(generator.integers(1, 12)))
        cost = float(generator.choice([0.01, 0.1, 1.0]))
        gains = 1 + np.cumsum(np.cumprod(np.concatenate(([1.0], sure)))) - 1
        rates = gains / (1 / cost + 8 + np.arange(1, len(gains) + 1))
        assert rates[worth_verifying(sure.tolist(), cost, 8) - 1] == pytest.approx(rates.max())


def test_drafts_behind_a_fallen_one_are_refreshed_and_dropped_when_the_next_falls_at_once() -> None:
    policy = Speculative(options_of("speculative"), EOS_ID, MASK_ID, 6)
    row = _Row(7, tokens=[20], drafts=[21, 22, 23, 24, 25], sure=[0.9] * 5, verified=3)
    assert policy._advance(row, [21, 99, 50], [0.0] * 3, [0.8, 0.7, 0.6]) == 2
    assert row.tokens == [20, 21, 99]
    assert (row.drafts, row.sure) == (
        [50, 24, 25],
        [0.6, 0.9, 0.9],
    )  # 23 gives way to the causal choice there
    assert row.doubtful
    row.verified = 2
    assert policy._advance(row, [77, 78], [0.0] * 2, [0.9] * 2) == 1
    assert row.tokens == [20, 21, 99, 77]
    assert row.drafts == row.sure == []
    assert (row.checked, row.accepted, row.queries) == ([2, 1], [1, 0], [3, 2])


def test_no_canvas_while_enough_drafts_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = draft_model(monkeypatch, 4, list(range(20, 80)), {})
    options = options_of("speculative", block_size=8, max_new_tokens=40, token_cost=1.0)
    (got,) = run(requests_of([4]), options).completions
    assert got.token_ids == tuple(range(20, 60))
    assert min(widths[2:]) >= 1
    assert expected_to_stand([]) == 0.0
    assert expected_to_stand([0.5, 0.5, 1.0]) == 1.0
