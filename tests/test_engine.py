"""The scheduler: a row's completion depends on its own request only, in every mode."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.decode import Request, decode, engine, policy
from recbole_dgr2.decode.policy import _sample, uniforms
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from tests.decoding import SPEC, assert_same, options_of, requests_of, run, script_model, watch_forward
from tests.tiny import ARCHITECTURES, EOS_ID, tiny_model

MODES = ("autoregressive", "block", "speculative")
FIXED_WIDTH = ("autoregressive", "block")  # modes in which every pass has the same number of query tokens
LENGTHS = (5, 11, 3, 8, 3, 17, 1, 6)


def early_end(mode: str, architecture: str = "qwen3") -> int:
    """An end token that rows meet at different times, so that slots are freed one by one."""
    free = run(requests_of(LENGTHS), options_of(mode), architecture).completions
    tokens = [token for completion in free for token in completion.token_ids[4:]]
    return max(set(tokens), key=tokens.count)


@pytest.mark.parametrize("batch_size", [2, 3, 8, 20])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_equals_each_row_alone(architecture: str, mode: str, batch_size: int) -> None:
    requests, eos_id = requests_of(LENGTHS), early_end(mode, architecture)
    alone = [run([r], options_of(mode), architecture, eos_id=eos_id).completions[0] for r in requests]
    assert {completion.finished for completion in alone} == {True, False}
    together = run(requests, options_of(mode, batch_size), architecture, eos_id=eos_id)
    assert_same(together.completions, alone)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_permuted_requests_give_permuted_completions(mode: str, temperature: float) -> None:
    requests, eos_id = requests_of(LENGTHS), early_end(mode)
    options = options_of(mode, 3, temperature=temperature)
    wanted = run(requests, options, eos_id=eos_id).completions
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(requests))
        got = run([requests[i] for i in order], options, eos_id=eos_id).completions
        assert_same(got, [wanted[i] for i in order])


@pytest.mark.parametrize("mode", MODES)
def test_a_refilled_slot_keeps_no_trace_of_the_row_before(mode: str) -> None:
    long, short = requests_of([40, 2])
    (alone,) = run([short], options_of(mode, 1)).completions
    after = run([long, short], options_of(mode, 1)).completions[1]
    assert_same([after], [alone])


@pytest.mark.parametrize("mode", FIXED_WIDTH)
def test_no_row_runs_in_a_forward_that_it_does_not_need(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, eos_id = requests_of([length + 20 for length in LENGTHS]), early_end(mode)
    sizes = watch_forward(monkeypatch)
    result = run(requests, options_of(mode, 4), eos_id=eos_id)
    q = 8 if mode == "block" else 1
    rows = [rows for rows, width in sizes if width == q]  # the other forwards are prefills
    assert sum(rows) == result.passes
    assert rows[0] == 4
    assert rows[-1] < 4


@pytest.mark.parametrize("mode", MODES)
def test_common_prefix_is_prefilled_once_and_changes_nothing(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = requests_of([30], seed=9)[0].prompt_ids
    requests = [Request(r.key, system + r.prompt_ids) for r in requests_of(LENGTHS)]
    requests.append(Request(7, system))  # the prefix itself is a prompt
    shared = watch_forward(monkeypatch)
    got = run(requests, options_of(mode, 3)).completions
    monkeypatch.undo()
    monkeypatch.setattr(engine, "PREFIX_LEAST", 1000)
    plain = watch_forward(monkeypatch)
    wanted = run(requests, options_of(mode, 3)).completions
    assert_same(got, wanted)
    assert shared[0] == (1, 29)
    assert max(width for _, width in shared[1:]) == 18  # the longest prompt less the prefix
    assert max(width for _, width in plain) == 47


def test_prefill_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(requests_of(LENGTHS), options_of(batch_size=8)).completions
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 24)
    sizes = watch_forward(monkeypatch)
    assert_same(run(requests_of(LENGTHS), options_of(batch_size=8)).completions, wanted)
    assert sizes[0] == (2, 11)


@pytest.mark.parametrize("mode", MODES)
def test_eager_attention_gives_the_same(mode: str) -> None:
    requests = requests_of(LENGTHS)
    model = tiny_model(attention="eager")
    got = decode(model, requests, options_of(mode, 3), eos_id=EOS_ID, spec=SPEC)
    assert_same(got.completions, run(requests, options_of(mode, 3)).completions)


@pytest.mark.parametrize("mode", MODES)
def test_pad_id_equal_to_eos_id(mode: str) -> None:
    """Prompts are padded with 0 inside: an end token 0, in prompts too, is like any other."""
    requests = [Request(r.key, (0, *r.prompt_ids, 0)) for r in requests_of(LENGTHS)]
    alone = [run([r], options_of(mode), eos_id=0).completions[0] for r in requests]
    assert_same(run(requests, options_of(mode, 3), eos_id=0).completions, alone)


@pytest.mark.parametrize("mode", MODES)
def test_samples_are_reproducible_and_know_no_neighbours(mode: str) -> None:
    requests = requests_of(LENGTHS)
    options = options_of(mode, 3, temperature=1.0, seed=5)
    wanted = run(requests, options).completions
    assert_same(run(requests, options).completions, wanted, tolerance=0)
    assert_same(run(requests[2:3], options).completions, wanted[2:3])
    other = run(requests, options_of(mode, 3, temperature=1.0, seed=6)).completions
    assert all(a.token_ids != b.token_ids for a, b in zip(other, wanted, strict=True))
    twins = [Request(key, requests[0].prompt_ids) for key in range(4)]
    assert len({completion.token_ids for completion in run(twins, options).completions}) == 4


@pytest.mark.parametrize("mode", FIXED_WIDTH)  # speculative: draft and verification share a number, by design
def test_no_random_number_is_used_twice(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = policy.uniforms
    used: list[tuple[int, ...]] = []

    def watch(seed: int, *words: np.ndarray) -> np.ndarray:
        used.extend(zip(*(word.tolist() for word in words), strict=True))
        return real(seed, *words)

    monkeypatch.setattr(policy, "uniforms", watch)
    run(requests_of(LENGTHS), options_of(mode, 3, temperature=1.0))
    assert len(set(used)) == len(used)
    assert {key for key, _, _ in used} == {100 + row for row in range(len(LENGTHS))}


def test_random_numbers_are_uniform_and_distinct() -> None:
    keys, positions, steps = (a.reshape(-1) for a in np.meshgrid(np.arange(20), np.arange(50), np.arange(10)))
    numbers = uniforms(3, keys, positions, steps)
    assert len(set(numbers.tolist())) == len(numbers)
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 1000).max() < 150  # five standard deviations
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_sampling_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3, 0.0])
    numbers = torch.tensor(np.linspace(0, 1, 1000, endpoint=False))
    scores = probabilities.log().expand(1000, 5)
    tokens = _sample(scores, numbers, torch.full((1000,), 2))
    frequencies = torch.bincount(tokens, minlength=5) / 1000
    torch.testing.assert_close(frequencies, probabilities, atol=2e-3, rtol=0)


def test_progress_counts_finished_requests() -> None:
    calls: list[int] = []
    model, requests = tiny_model(), requests_of(LENGTHS)
    decode(model, requests, options_of(batch_size=3), eos_id=EOS_ID, spec=SPEC, progress=calls.append)
    assert calls == list(range(1, len(LENGTHS) + 1))


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_end_at_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script_model(monkeypatch, 4, [EOS_ID], [9.0])
    result = run(requests_of([4] * 7), options_of(mode, 2))
    assert [completion.token_ids for completion in result.completions] == [(EOS_ID,)] * 7
    assert result.passes == 0


def test_no_requests() -> None:
    assert run([], options_of()).completions == ()


def test_times_are_split() -> None:
    result = run(requests_of(LENGTHS), options_of())
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0


def test_the_models_mode_is_restored_and_dropout_is_off() -> None:
    model = tiny_model()
    model.train()
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.5
    got = decode(model, requests_of(LENGTHS), options_of(), eos_id=EOS_ID, spec=SPEC)
    assert model.training
    assert_same(got.completions, run(requests_of(LENGTHS), options_of()).completions)


@pytest.mark.parametrize(
    ("prompt", "options", "spec", "message"),
    [
        ((), {}, SPEC, "request 3: the prompt is empty"),
        ((5, 96), {}, SPEC, "request 3: a prompt token is outside the vocabulary of 96 rows"),
        ((5, -1), {}, SPEC, "request 3: a prompt token is outside"),
        ((5,) * 500, {}, SPEC, "request 3: 500 prompt tokens .* shorten the prompt to 492"),
        ((5,), {}, None, "conversion stage"),
        ((5,), {}, BlockDiffusionSpec(8, 96), "mask_id 96 is outside the model's 96 embedding rows"),
        ((5,), {"block_size": 9}, SPEC, "block_size 9 is above the trained block size, at most 8"),
    ],
)
def test_bad_input_is_a_one_line_error(
    prompt: tuple[int, ...], options: dict, spec: object, message: str
) -> None:
    requests = [Request(2, (5,)), Request(3, prompt)]
    with pytest.raises(ValueError, match=message) as error:
        decode(tiny_model(), requests, options_of(**options), eos_id=EOS_ID, spec=spec)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7),
    batch_size=st.integers(1, 8),
    block_size=st.integers(1, 8),
    limit=st.integers(1, 14),
    mode=st.sampled_from(MODES),
)
def test_any_ragged_batch_equals_each_row_alone(
    lengths: list[int], batch_size: int, block_size: int, limit: int, mode: str
) -> None:
    requests = requests_of(lengths, seed=sum(lengths))
    options = options_of(mode, batch_size, limit, block_size=block_size)
    alone = [run([request], options).completions[0] for request in requests]
    assert_same(run(requests, options).completions, alone)


@pytest.mark.parametrize("mode", MODES)
def test_many_long_requests(mode: str) -> None:
    requests = requests_of(np.random.default_rng(0).integers(60, 200, size=24).tolist())
    result = run(requests, options_of(mode, 8, 64))
    assert [completion.key for completion in result.completions] == [request.key for request in requests]
    assert {len(completion.token_ids) for completion in result.completions if not completion.finished} <= {64}


@pytest.mark.parametrize("mode", ["autoregressive", "block", "speculative"])
def test_ten_thousand_requests_take_the_memory_of_a_batch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache of the batch's shape serves them all, and no tensor of a request outlives it."""
    caches: list[engine.SlotCache] = []

    class Watched(engine.SlotCache):
        def __init__(self, slots: int, length: int, device: torch.device) -> None:
            super().__init__(slots, length, device)
            caches.append(self)

    monkeypatch.setattr(engine, "SlotCache", Watched)
    prompts = [request.prompt_ids for request in requests_of([3, 4, 5, 6])]
    requests = [Request(number, prompts[number % 4]) for number in range(10_000)]
    tensors: list[int] = []

    def count(finished: int) -> None:
        if finished in (2_000, 9_000):
            tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    model = tiny_model()
    options = options_of(mode, batch_size=64, max_new_tokens=2)
    result = decode(model, requests, options, eos_id=EOS_ID, spec=SPEC, progress=count)
    assert len(result.completions) == 10_000
    (cache,) = caches
    config = model.config
    width = config.num_key_value_heads * config.head_dim
    assert cache.nbytes == 2 * config.num_hidden_layers * 64 * cache.length * width * 4
    assert tensors[1] <= tensors[0] + 8
