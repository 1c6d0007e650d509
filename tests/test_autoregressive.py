"""Autoregressive decoding equals the model's own greedy generation and its own log-probabilities."""

from __future__ import annotations

import pytest
import torch

from recbole_dgr2.decode import Completion, Request, decode
from tests.decoding import SPEC, options_of, requests_of, run, script_model
from tests.tiny import ARCHITECTURES, EOS_ID, MASK_ID, tiny_model

LENGTHS = (5, 11, 3, 8, 3)


def generate(model: torch.nn.Module, request: Request, tokens: int, eos_id: int) -> tuple[int, ...]:
    """Hugging Face greedy generation of one prompt alone, the mask token suppressed."""
    ids = torch.tensor([request.prompt_ids])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=eos_id,
        pad_token_id=0,
        suppress_tokens=[MASK_ID],
    )
    return tuple(out[0, len(request.prompt_ids) :].tolist())


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_generate(architecture: str, batch_size: int) -> None:
    requests, model = requests_of(LENGTHS), tiny_model(architecture)
    # an end token that some rows meet and some do not
    eos_id = generate(model, requests[0], 20, EOS_ID)[6]
    got = run(requests, options_of("autoregressive", batch_size), architecture, eos_id=eos_id)
    wanted = [generate(model, request, 20, eos_id) for request in requests]
    assert [completion.token_ids for completion in got.completions] == wanted
    assert [completion.finished for completion in got.completions] == [ids[-1] == eos_id for ids in wanted]
    assert {completion.finished for completion in got.completions} == {True, False}


@torch.inference_mode()
def log_probs_of(model: torch.nn.Module, request: Request, completion: Completion) -> torch.Tensor:
    """Full-distribution log-probabilities [R, V] of one plain forward, the mask token left out."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
    logits[:, MASK_ID] = -torch.inf
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trace_holds_the_models_own_log_probs(temperature: float) -> None:
    requests, model = requests_of(LENGTHS), tiny_model()
    result = run(requests, options_of("autoregressive", temperature=temperature))
    for request, completion in zip(requests, result.completions, strict=True):
        full = (log_probs_of(model, request, completion) / (temperature or 1.0)).log_softmax(dim=-1)
        chosen = full.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.trace.log_probs == pytest.approx(chosen.tolist(), abs=1e-5)
        assert completion.trace.confidences == pytest.approx(full.exp().amax(dim=-1).tolist(), abs=1e-5)
        assert completion.trace.tokens == completion.token_ids
        assert set(completion.trace.steps) == {0}
        assert (completion.trace.block_size, completion.trace.temperature) == (1, temperature)


def test_one_pass_a_token_after_the_first() -> None:
    result = run(requests_of(LENGTHS), options_of("autoregressive", max_new_tokens=9))
    assert [completion.passes for completion in result.completions] == [8] * 5
    assert result.tokens_per_forward == pytest.approx(9 / 8)


def test_without_a_spec_every_token_may_be_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    script_model(monkeypatch, 4, [MASK_ID, 7, EOS_ID], [9.0] * 3)
    options, requests = options_of("autoregressive"), requests_of([4])
    (free,) = decode(tiny_model(), requests, options, eos_id=EOS_ID).completions
    assert free.token_ids == (MASK_ID, 7, EOS_ID)
    (converted,) = decode(tiny_model(), requests, options, eos_id=EOS_ID, spec=SPEC).completions
    assert converted.token_ids[0] != MASK_ID


@pytest.mark.parametrize(("at", "finished"), [(0, True), (4, True), (5, False)])
def test_end_token_counts_within_the_limit_only(
    monkeypatch: pytest.MonkeyPatch, at: int, finished: bool
) -> None:
    tokens = [7] * at + [EOS_ID]
    script_model(monkeypatch, 4, tokens, [9.0] * len(tokens))
    (got,) = run(requests_of([4]), options_of("autoregressive", max_new_tokens=5)).completions
    assert got.token_ids == tuple(tokens[:5])
    assert got.finished is finished
    assert got.passes == len(got.token_ids) - 1
