"""The contract that training and decoding rest on, for Qwen3 and Llama shapes in float32.

Cached block decoding equals one full `[P | C | N]` forward, the clean stream is the plain AR model, nothing
leaks from later tokens, padding, neighbours or other copies.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from recbole_dgr2.model.block_diffusion import Layout, block_index
from recbole_dgr2.model.forward import TokenScorer, forward_cached
from recbole_dgr2.model.loss import weighted_nll
from tests.layouts import PROMPTS, RESPONSES, SIZE, Case, lay_out, ragged_case, scored, small_spec
from tests.tiny import ARCHITECTURES, MASK_ID, VOCAB, tiny_model

models = pytest.mark.parametrize("architecture", ARCHITECTURES)
contexts = pytest.mark.parametrize("context", ["causal", "block"])


def _real(layout: Layout, logits: Tensor) -> Tensor:
    """Logits [B, (K,) R, V] at real slots only."""
    real = layout.real if logits.dim() == 3 else layout.real[:, None].expand(logits.shape[:3])
    return logits[real]


def _decode_logits(model: PreTrainedModel, case: Case, row: int, copy: int, context: str) -> list[Tensor]:
    """What a decoder sees for one row: prefill, then for each block a canvas, cropped away, and a commit.

    Returns the logits [V] of every response slot: slot 0 from the pass before, the others from the canvas.
    """
    cache = DynamicCache()
    prompt = case["prompt"][row, : case["prompt_length"][row]]
    length = int(case["response_length"][row])
    block_of, _ = block_index(length, SIZE, case["anchor"][row : row + 1])

    def step(ids: Tensor, causal: bool) -> Tensor:
        past = cache.get_seq_length()
        allowed = torch.ones(len(ids), past + len(ids), dtype=torch.bool)
        if causal:
            allowed = allowed.tril(past)
        positions = torch.arange(past, past + len(ids))
        cols = torch.arange(len(ids))
        return forward_cached(
            model, ids[None], positions[None], allowed[None], cache, torch.zeros_like(cols), cols
        )

    scored = []
    seed = step(prompt, causal=True)[-1]
    for block in block_of[0].unique().tolist():
        slots = (block_of[0] == block).nonzero().flatten()
        clean = case["response"][row, slots]
        canvas = torch.where(case["masked"][row, copy, slots], MASK_ID, clean)
        denoised = step(canvas, causal=False)
        cache.crop(-len(canvas))
        scored += [seed, *denoised[:-1]]
        seed = step(clean, causal=context == "causal")[-1]
    return scored


@models
@contexts
@pytest.mark.parametrize("anchor", [None, [1, 3, 2]])
def test_cached_block_decoding_is_one_full_forward(
    architecture: str, context: str, anchor: list[int] | None
) -> None:
    model, case = tiny_model(architecture), ragged_case(anchor=anchor)
    layout = lay_out(spec=small_spec(context), **case)
    full = scored(model, layout, layout.source)
    with torch.no_grad():
        for row, length in enumerate(RESPONSES):
            for copy in range(2):
                decoded = torch.stack(_decode_logits(model, case, row, copy, context))
                assert torch.allclose(decoded, full[row, copy, :length], atol=1e-5, rtol=0)


@models
def test_leaving_out_the_commit_pass_would_show(architecture: str) -> None:
    """The parity test has teeth: another commit pass does not meet the layout's logits."""
    model, case = tiny_model(architecture), ragged_case()
    layout = lay_out(spec=small_spec("causal"), **case)
    full = scored(model, layout, layout.source)
    with torch.no_grad():
        decoded = torch.stack(_decode_logits(model, case, 0, 0, "block"))
    assert not torch.allclose(decoded, full[0, 0], atol=1e-3)


@models
def test_clean_stream_is_the_plain_model(architecture: str) -> None:
    model, case = tiny_model(architecture), ragged_case()
    layout = lay_out(spec=small_spec(), **case)
    logits = scored(model, layout, layout.clean_source)
    for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = torch.cat([case["prompt"][row, :p], case["response"][row, :r]])
        with torch.no_grad():
            plain = model(ids[None]).logits[0, p - 1 : p + r - 1]
        assert torch.allclose(logits[row, :r], plain, atol=1e-5, rtol=0)


@models
@contexts
def test_a_later_token_changes_no_earlier_logit(architecture: str, context: str) -> None:
    """Flip response token k everywhere: no slot scored without seeing it moves, those that see it do."""
    model, case = tiny_model(architecture), ragged_case(copies=1)
    spec = small_spec(context)
    case["masked"] = torch.zeros_like(case["masked"])
    layout = lay_out(spec=spec, **case)
    before, before_clean = scored(model, layout, layout.source), scored(model, layout, layout.clean_source)
    for k in (0, 3, 6, 11):
        flipped = dict(case, response=case["response"].clone())
        flipped["response"][0, k] = (case["response"][0, k] + 1) % 80
        other = lay_out(spec=spec, **flipped)
        after, after_clean = scored(model, other, other.source), scored(model, other, other.clean_source)
        block = k // SIZE
        same = layout.block_of[0] < block
        same |= (layout.block_of[0] == block) & layout.is_slot0[0]
        assert torch.equal(before[0, 0][same], after[0, 0][same]), "earlier blocks and the own block's seed"
        scorable = layout.clean_scorable[0] & (torch.arange(12) <= k)
        assert torch.equal(before_clean[0][scorable], after_clean[0][scorable])
        later = layout.block_of[0] > block
        if later.any():
            assert not torch.allclose(before[0, 0][later], after[0, 0][later], atol=1e-4)
        assert torch.equal(before[1:], after[1:]), "other rows"


@models
@contexts
def test_a_masked_token_is_never_seen(architecture: str, context: str) -> None:
    """A masked slot's own token moves no logit of its block, through no stream and no other copy."""
    model, case = tiny_model(architecture), ragged_case(copies=2)
    case["masked"] = torch.zeros_like(case["masked"])
    case["masked"][0, 0, 6] = True
    flipped = dict(case, response=case["response"].clone())
    flipped["response"][0, 6] = (case["response"][0, 6] + 1) % 80
    one, two = (lay_out(spec=small_spec(context), **c) for c in (case, flipped))
    before, after = scored(model, one, one.source), scored(model, two, two.source)
    assert torch.equal(before[0, 0, :8], after[0, 0, :8]), "up to the end of its block"
    assert not torch.allclose(before[0, 1, 5:8], after[0, 1, 5:8], atol=1e-4), "copy 1 holds it visibly"


@models
@contexts
def test_padding_and_batch_composition_change_nothing(architecture: str, context: str) -> None:
    model, case = tiny_model(architecture), ragged_case()
    layout = lay_out(spec=small_spec(context), **case)
    together = scored(model, layout, layout.source)
    assert torch.isfinite(together).all()
    for row, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        pick = slice(row, row + 1)
        for extra in (0, 5):
            alone = {
                "prompt": torch.cat([case["prompt"][pick, :p], torch.full((1, extra), MASK_ID)], dim=1),
                "response": torch.cat([case["response"][pick, :r], torch.full((1, extra), 77)], dim=1),
                "masked": torch.cat(
                    [case["masked"][pick, :, :r], torch.zeros(1, 2, extra, dtype=torch.bool)], dim=2
                ),
            }
            lengths = {name: case[name][pick] for name in ("prompt_length", "response_length", "anchor")}
            single = lay_out(spec=small_spec(context), **alone, **lengths)
            logits = scored(model, single, single.source)
            assert torch.allclose(logits[0, :, :r], together[row, :, :r], atol=1e-5, rtol=0)


@models
@contexts
def test_copies_are_blind_to_one_another(architecture: str, context: str) -> None:
    model, case = tiny_model(architecture), ragged_case(copies=3)
    layout = lay_out(spec=small_spec(context), **case)
    together = scored(model, layout, layout.source)
    for copy in range(3):
        one = lay_out(spec=small_spec(context), **dict(case, masked=case["masked"][:, copy : copy + 1]))
        alone = scored(model, one, one.source)
        assert torch.allclose(
            _real(one, alone), _real(layout, together[:, copy : copy + 1]), atol=1e-5, rtol=0
        )


@models
def test_a_random_model_scores_about_log_v(architecture: str) -> None:
    """No answer leaks into a masked slot: an untrained model is at chance, not near zero."""
    model, case = tiny_model(architecture), ragged_case(seed=4)
    layout = lay_out(spec=small_spec(), **case)
    logits = scored(model, layout, layout.source)[case["masked"] & layout.real[:, None]]
    targets = case["response"][:, None].expand_as(case["masked"])[case["masked"] & layout.real[:, None]]
    loss = weighted_nll(logits, targets, torch.ones(len(targets)))
    assert float(torch.tensor(VOCAB).log()) - 0.5 < float(loss) < float(torch.tensor(VOCAB).log()) + 1.5


@models
def test_gradients_flow_and_padding_gives_none(architecture: str) -> None:
    model, case = tiny_model(architecture), ragged_case()
    layout = lay_out(spec=small_spec(), **case)
    where = (case["masked"] & layout.real[:, None]).nonzero()
    rows, cols = where[:, 0], layout.source[where[:, 0], where[:, 1], where[:, 2]]
    model.train()
    logits = TokenScorer(model)(layout.ids, layout.positions, layout.allowed, rows, cols)
    weighted_nll(logits, case["response"][rows, where[:, 2]], torch.ones(len(rows))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert model.get_input_embeddings().weight.grad[MASK_ID].abs().sum() > 0
