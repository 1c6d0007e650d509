"""The forward passes: masks for each attention, the unmasked path, adapters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from recbole_dgr2.model.forward import attention_mask, forward_cached, verify_forward, without_mask_id
from tests.layouts import lay_out, ragged_case, scored, small_spec
from tests.tiny import ARCHITECTURES, random_tokens, tiny_model

models = pytest.mark.parametrize("architecture", ARCHITECTURES)


@models
def test_eager_and_sdpa_agree(architecture: str) -> None:
    case = ragged_case()
    layout = lay_out(spec=small_spec("block"), **case)
    sdpa, eager = tiny_model(architecture), tiny_model(architecture, attention="eager")
    one, two = (scored(m, layout, layout.source)[layout.real.nonzero()[:, 0]] for m in (sdpa, eager))
    assert torch.allclose(one, two, atol=1e-5, rtol=0)
    assert attention_mask(sdpa, layout.allowed).dtype == torch.bool
    assert attention_mask(eager, layout.allowed).dtype == torch.float32
    eager.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"flex_attention.*sdpa"):
        attention_mask(eager, layout.allowed)


@models
@torch.no_grad()
def test_no_mask_is_full_attention(architecture: str) -> None:
    """allowed=None attends to everything, against a cache too, and leaves the model causal for others."""
    model = tiny_model(architecture)
    prompt, canvas = torch.tensor(random_tokens([6])), torch.tensor(random_tokens([4], seed=1))
    plain = model(prompt).logits
    results = []
    for allowed in (None, torch.ones(1, 4, 10, dtype=torch.bool)):
        cache = DynamicCache()
        causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
        zeros, cols = torch.zeros(6, dtype=torch.long), torch.arange(6)
        prefill = forward_cached(model, prompt, torch.arange(6)[None], causal, cache, zeros, cols)
        assert torch.allclose(prefill, plain[0], atol=1e-5)
        positions = torch.arange(6, 10)[None]
        results.append(forward_cached(model, canvas, positions, allowed, cache, zeros[:4], cols[:4]))
    assert torch.allclose(*results, atol=1e-5)
    assert torch.equal(model(prompt).logits, plain)


@models
def test_adapters_are_looked_through(architecture: str) -> None:
    peft = pytest.importorskip("peft")
    model, case = tiny_model(architecture), ragged_case()
    layout = lay_out(spec=small_spec(), **case)
    before = scored(model, layout, layout.source)
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, options)
    with_adapter = scored(adapted, layout, layout.source)
    assert not torch.allclose(with_adapter[layout.real.nonzero()[:, 0]], before[layout.real.nonzero()[:, 0]])
    with adapted.disable_adapter():
        off = scored(adapted, layout, layout.source)
    assert torch.equal(off, before), "the teacher is the adapter switched off"


def test_without_mask_id() -> None:
    logits = torch.zeros(2, 3, 5)
    barred = without_mask_id(logits, 4)
    assert (barred[..., 4] == -torch.inf).all() and not logits[..., 4].any()
    assert without_mask_id(logits, None) is logits


class _Changed(torch.nn.Module):
    """A causal LM whose logits or inner arguments are not what they should be."""

    def __init__(self, model: PreTrainedModel, logits: Any = None, arguments: Any = None) -> None:
        super().__init__()
        self.inner, self.logits, self.arguments = model, logits, arguments
        self.config = model.config
        self.get_input_embeddings = model.get_input_embeddings
        self.get_output_embeddings = model.get_output_embeddings

    def base_model(self, **kwargs: Any) -> Any:
        return self.inner.base_model(**(self.arguments(kwargs) if self.arguments else kwargs))

    def forward(self, **kwargs: Any) -> Any:
        output = self.inner(**kwargs)
        output.logits = self.logits(output.logits) if self.logits else output.logits
        return output


@models
def test_verify_forward(architecture: str) -> None:
    model = tiny_model(architecture)
    for good in (model, tiny_model(architecture, attention="eager"), _Changed(model)):
        verify_forward(good)
    verify_forward(tiny_model(architecture).to(torch.bfloat16))
    for change in (lambda x: 0.5 * x, lambda x: 30 * torch.tanh(x / 30)):
        with pytest.raises(ValueError, match="not just the head"):
            verify_forward(_Changed(model, logits=change))
    with pytest.raises(ValueError, match="ignores the attention mask"):
        verify_forward(_Changed(model, arguments=lambda kwargs: kwargs | {"attention_mask": None}))
    with pytest.raises(ValueError, match="ignores position ids"):
        verify_forward(_Changed(model, arguments=lambda kwargs: kwargs | {"position_ids": None}))
