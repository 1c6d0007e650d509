"""Block decoding: equal to AR at block size 1, replayable in one full forward, and its stopping rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recbole_dgr2.decode import Completion, Request, engine
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec, build_layout
from recbole_dgr2.model.forward import TokenScorer
from tests.decoding import SPEC, assert_same, options_of, requests_of, run, script_model, watch_forward
from tests.tiny import ARCHITECTURES, EOS_ID, MASK_ID, tiny_model

CONTEXTS = ("causal", "block")
LENGTHS = (5, 11, 3, 8, 3)
NO_EOS = -1
SURE, WEAK = 12.0, 3.0  # logits of probability > .999 and of about .17 over the tiny vocabulary


def spec_of(context: str, block_size: int = 8) -> BlockDiffusionSpec:
    return BlockDiffusionSpec(block_size, MASK_ID, context)  # type: ignore[arg-type]


@torch.inference_mode()
def replay(
    model: torch.nn.Module, request: Request, completion: Completion, context: str
) -> tuple[list[float], list[float]]:
    """(log-probabilities, confidences) of all committed slots, recomputed without any cache.

    One [P | C | N1 ... NS] forward: copy s shows each block as it was before its denoising pass s.
    """
    trace = completion.trace
    tokens, steps = torch.tensor([trace.tokens]), torch.tensor(trace.steps)
    copies = max(int(steps.max()), 1)
    masked = torch.stack([(steps >= s) | (steps < 0) for s in range(1, copies + 1)])[None]
    prompt, size = torch.tensor([request.prompt_ids]), torch.tensor([len(trace.tokens)])
    layout = build_layout(
        (prompt, torch.tensor([len(request.prompt_ids)])),
        (tokens, size),
        spec_of(context, trace.block_size),
        masked,
    )
    slots = (steps >= 0).nonzero()[:, 0]
    source = layout.source[0][(steps[slots] - 1).clamp_min(0), slots]
    logits = TokenScorer(model)(
        layout.ids, layout.positions, layout.allowed, torch.zeros_like(source), source
    )
    logits[:, MASK_ID] = -torch.inf
    scores = (logits / (trace.temperature or 1.0)).log_softmax(dim=-1)
    chosen = scores.gather(1, tokens[0, slots][:, None])[:, 0]
    return chosen.tolist(), scores.exp().amax(dim=-1).tolist()


def committed(values: tuple[float, ...], completion: Completion) -> list[float]:
    return [value for value, step in zip(values, completion.trace.steps, strict=True) if step >= 0]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_size_one_is_autoregressive(architecture: str, context: str) -> None:
    requests = requests_of(LENGTHS)
    wanted = run(requests, options_of("autoregressive", 3), architecture)
    got = run(requests, options_of("block", 3, block_size=1), architecture, spec_of(context))
    assert_same(got.completions, wanted.completions)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cached_decoding_equals_one_full_forward(architecture: str, context: str, temperature: float) -> None:
    requests, model = requests_of(LENGTHS), tiny_model(architecture)
    requests[1] = Request(101, (*requests[1].prompt_ids, MASK_ID, 5))  # ordinary text in a prompt
    options = options_of("block", 3, max_new_tokens=29, temperature=temperature)
    result = run(requests, options, architecture, spec_of(context), eos_id=NO_EOS)
    for request, completion in zip(requests, result.completions, strict=True):
        log_probs, confidences = replay(model, request, completion, context)
        assert committed(completion.trace.log_probs, completion) == pytest.approx(log_probs, abs=1e-5)
        assert committed(completion.trace.confidences, completion) == pytest.approx(confidences, abs=1e-5)
        assert len(completion.trace.tokens) == 32
        assert completion.passes < 29 + 4  # some pass committed more than one slot


@pytest.mark.parametrize("context", CONTEXTS)
def test_replay_holds_where_the_end_token_is_in_mid_block(context: str) -> None:
    request, model = requests_of([6])[0], tiny_model()
    plain = run([request], options_of(), spec=spec_of(context)).completions[0]
    eos_id = plain.token_ids[11]
    got = run([request], options_of(), spec=spec_of(context), eos_id=eos_id).completions[0]
    assert got.finished
    assert got.token_ids == plain.token_ids[: plain.token_ids.index(eos_id) + 1]
    assert replay(model, request, got, context)[0] == pytest.approx(
        committed(got.trace.log_probs, got), abs=1e-5
    )


def test_both_contexts_differ() -> None:
    requests = requests_of(LENGTHS)
    causal, block = (run(requests, options_of(), spec=spec_of(context)) for context in CONTEXTS)
    assert causal.completions != block.completions


def test_the_threshold_is_the_rule() -> None:
    result = run(requests_of(LENGTHS), options_of())
    several = 0
    for completion in result.completions:
        trace = completion.trace
        for begin in range(0, len(trace.tokens), 8):
            steps, sure = trace.steps[begin : begin + 8], trace.confidences[begin : begin + 8]
            for step in range(1, max(steps) + 1):
                together = [c for s, c in zip(steps, sure, strict=True) if s == step]
                assert together  # every pass commits something
                assert sum(c < 0.06 for c in together) == 0 or len(together) == 1
                several += len(together) > 1
    assert several


def test_tau_one_commits_one_slot_a_pass_and_tau_tiny_a_block() -> None:
    requests = requests_of(LENGTHS)
    slow = run(requests, options_of(tau=1.0, max_new_tokens=16)).completions
    fast = run(requests, options_of(tau=1e-6, max_new_tokens=16)).completions
    assert all(8 + 1 + 1 <= completion.passes <= 7 + 1 + 7 for completion in slow)
    assert {completion.passes for completion in fast} == {1 + 1 + 1}


@pytest.mark.parametrize("tau", [0.03, 0.06, 1.0])
def test_passes_are_bounded_by_slots_and_blocks(tau: float) -> None:
    for completion in run(requests_of(LENGTHS), options_of(tau=tau, max_new_tokens=27)).completions:
        blocks = len(completion.trace.tokens) // 8
        denoised = sum(step > 0 for step in completion.trace.steps)
        assert completion.passes <= denoised + blocks - 1
        passes = sum(max(completion.trace.steps[8 * b : 8 * b + 8]) for b in range(blocks)) + blocks - 1
        assert completion.passes == passes  # denoising passes, and a commit pass for every block but the last


def test_without_the_commit_pass_the_output_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of([6])
    options = options_of(batch_size=1, max_new_tokens=24)
    wanted = run(requests, options).completions[0]
    real, skipped = engine.forward_cached, []

    def forward(model: Any, ids: Any, positions: Any, allowed: Any, cache: Any, rows: Any, cols: Any) -> Any:
        commit = ids.shape[1] == 8 and cols.tolist() == [7]
        before = [buffer.clone() for buffer in [*cache.keys, *cache.values]] if commit else []
        logits = real(model, ids, positions, allowed, cache, rows, cols)
        if commit:  # its logits are used, its keys are not: those of the last canvas stay
            for buffer, old in zip([*cache.keys, *cache.values], before, strict=True):
                buffer.copy_(old)
            skipped.append(1)
        return logits

    monkeypatch.setattr(engine, "forward_cached", forward)
    got = run(requests, options).completions[0]
    assert len(skipped) == 2
    assert got.trace.log_probs[:9] == wanted.trace.log_probs[:9]
    assert max(abs(a - b) for a, b in zip(got.trace.log_probs, wanted.trace.log_probs, strict=True)) > 1e-2


@pytest.mark.parametrize("at", range(13))
def test_end_token_in_every_position_of_a_block(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    tokens = [*range(20, 20 + at), EOS_ID, *range(50, 58)]
    script_model(monkeypatch, 4, tokens, [SURE] * len(tokens))
    (got,) = run(requests_of([4]), options_of(block_size=4, tau=0.9)).completions
    blocks, slot = divmod(at, 4)
    assert got.token_ids == tuple(tokens[: at + 1])
    assert got.finished
    assert got.passes == 2 * blocks + (
        slot > 0
    )  # a seed that ends the row costs no pass; no last commit pass
    end = 4 * (blocks + 1)
    if slot == 0:
        assert got.trace.tokens == (*tokens[: at + 1], MASK_ID, MASK_ID, MASK_ID)
        assert got.trace.steps[at:] == (0, -1, -1, -1)
    else:
        assert got.trace.tokens == tuple(tokens[:end])
        assert got.trace.steps == (0, 1, 1, 1) * (blocks + 1)


def test_end_token_waits_for_the_masked_slots_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [20, 21, 22, EOS_ID, 24, 25, 26, 27]
    script_model(monkeypatch, 4, tokens, [SURE, WEAK, WEAK + 0.5, SURE, WEAK - 1, SURE, WEAK - 1, WEAK - 1])
    (got,) = run(requests_of([4]), options_of(tau=0.9)).completions
    assert got.token_ids == (20, 21, 22, EOS_ID)
    assert got.finished
    assert got.passes == 3
    assert got.trace.tokens == (20, 21, 22, EOS_ID, MASK_ID, 25, MASK_ID, MASK_ID)
    assert got.trace.steps == (0, 3, 2, 1, -1, 1, -1, -1)
    assert [p == 0 for p in got.trace.confidences] == [step == -1 for step in got.trace.steps]


def test_token_limit_in_mid_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [20, 21, 22, 23, 24, 25, EOS_ID, 27]
    script_model(monkeypatch, 4, tokens, [SURE] * 5 + [WEAK] * 3)
    (got,) = run(requests_of([4]), options_of(tau=0.9, max_new_tokens=5)).completions
    assert (got.token_ids, got.finished, got.passes) == ((20, 21, 22, 23, 24), False, 1)
    (longer,) = run(requests_of([4]), options_of(tau=0.9, max_new_tokens=7)).completions
    assert (longer.token_ids, longer.finished) == (tuple(tokens[:7]), True)
    script_model(monkeypatch, 4, tokens, [SURE] * 8)  # the end token is committed, but beyond the limit
    (exact,) = run(requests_of([4]), options_of(tau=0.9, max_new_tokens=6)).completions
    assert (exact.token_ids, exact.finished) == (tuple(tokens[:6]), False)


@pytest.mark.parametrize("mode", ["autoregressive", "block", "speculative"])
def test_mask_token_is_never_emitted(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    requests = requests_of(LENGTHS)
    wanted = run(requests, options_of(mode)).completions

    def prefer_mask(logits: torch.Tensor) -> torch.Tensor:
        return logits.index_add(1, torch.tensor([MASK_ID]), torch.full((len(logits), 1), 100.0))

    watch_forward(monkeypatch, prefer_mask)
    got = run(requests, options_of(mode)).completions
    assert_same(got, wanted)
    assert all(MASK_ID not in completion.token_ids for completion in got)


def test_a_mask_id_equal_to_no_slot_state() -> None:
    """A prompt full of the mask id is text: decoding does not take any of it for a masked slot."""
    request = Request(1, (MASK_ID,) * 6)
    (got,) = run([request], options_of()).completions
    assert got.trace.log_probs[0] == pytest.approx(
        replay(tiny_model(), request, got, "causal")[0][0], abs=1e-5
    )
    assert len(got.token_ids) == 20


def test_smaller_blocks_than_trained() -> None:
    result = run(requests_of(LENGTHS), options_of(block_size=3, max_new_tokens=7), spec=SPEC)
    assert {len(completion.trace.tokens) for completion in result.completions} == {9}
    assert {completion.trace.block_size for completion in result.completions} == {3}
