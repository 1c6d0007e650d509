"""Adapters: a fresh one changes nothing, off is the teacher to the last bit, on is what decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.decode import DecodeOptions, Request, decode
from recbole_dgr2.model.adapters import AdapterOptions, adapt, adapter_off, merge
from recbole_dgr2.trainer.optimizers import parameter_groups
from tests.adapting import BASE, IDS, SIZE, architectures, converted, logits, plain, stir
from tests.tiny import random_tokens

backbones = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@architectures
@backbones
def test_fresh_off_and_merged(architecture: str, tied: bool) -> None:
    before = logits(plain(architecture, tied))
    state = torch.get_rng_state()
    backbone = adapt(plain(architecture, tied), SIZE, BASE, IDS, seed=0)
    assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"
    assert torch.equal(logits(backbone), before), "a fresh adapter changes nothing"
    assert backbone.rows == 384
    stir(backbone)
    trained = {name for name, weight in backbone.model.named_parameters() if weight.requires_grad}
    on = logits(backbone)
    with adapter_off(backbone.model):
        assert torch.equal(logits(backbone), before), "off, it is the base"
    assert torch.equal(logits(backbone), on) and not torch.allclose(on, before, atol=0.1)
    assert trained == {name for name, weight in backbone.model.named_parameters() if weight.requires_grad}
    names = [name for name, _ in plain(architecture, tied).model.named_parameters()]
    merged = merge(backbone)
    assert torch.allclose(logits(merged), on, atol=1e-4)
    assert [name for name, _ in merged.model.named_parameters()] == names
    assert all(weight.requires_grad for weight in merged.model.parameters())
    embedding, head = merged.model.get_input_embeddings(), merged.model.get_output_embeddings()
    assert (embedding.weight is head.weight) is tied
    assert merge(merged) is merged


@backbones
def test_rows_of_new_tokens_are_trained_and_no_other(tied: bool) -> None:
    backbone, reference = adapt(plain(tied=tied), SIZE, BASE, IDS, seed=0), plain(tied=tied)
    ids = torch.tensor([[5, 310, 7, 319, 310, 9]])
    for each in (backbone, reference):
        each.model(ids).logits.log_softmax(-1)[0, :, [5, 310, 319]].sum().backward()
    whole = reference.model.get_input_embeddings().weight.grad[IDS]
    rows = {n: p for n, p in backbone.model.named_parameters() if p.requires_grad and "tokens_delta" in n}
    assert len(rows) == (1 if tied else 2)
    found = next(p.grad for n, p in rows.items() if "embed_tokens" in n)
    assert torch.allclose(found, whole, atol=1e-5)
    decaying, kept = parameter_groups(backbone.model.modules(), 0.1)
    assert {id(p) for p in rows.values()} <= {id(p) for p in kept["params"]}
    names = {id(p): n for n, p in backbone.model.named_parameters()}
    assert all("lora_" in names[id(p)] for p in decaying["params"])


def test_rows_equal_a_matrix_with_these_rows() -> None:
    backbone, reference = adapt(plain(), SIZE, BASE, IDS, seed=0), plain()
    values = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if "tokens_delta" in name:
                parameter.copy_(values)
        reference.model.get_input_embeddings().weight[IDS] = values
    ids = torch.tensor([[310, 5, 319, 320, 383, 0, 311, 309]])
    assert torch.allclose(logits(backbone, ids), logits(reference, ids), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rank": 0}, "lora_rank=0"),
        ({"alpha": 0.0}, "lora_alpha=0.0"),
        ({"targets": ("q_prj",)}, "lora_targets: 'q_prj'.*nearest: q_proj"),
        ({"targets": ("lm_head",)}, "lora_targets: 'lm_head'"),
    ],
)
def test_bad_options(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        adapt(plain(), AdapterOptions(**{"rank": 2, "alpha": 4.0, **values}), BASE, IDS, seed=0)


@pytest.mark.parametrize("mode", ["autoregressive", "block", "speculative"])
@architectures
def test_decoding_under_an_adapter_is_that_of_the_merged_weights(
    mode: Any, architecture: str, tmp_path: Path
) -> None:
    backbone, spec = converted(tmp_path / "ar_teacher", architecture)
    stir(backbone)
    prompts = [Request(i, tuple(row)) for i, row in enumerate(random_tokens([5, 11, 8], high=320))]
    options = DecodeOptions(mode, 12, 3, tau=0.05)
    pair = []
    for each in (backbone, merge(backbone)):
        result = decode(each.model, prompts, options, eos_id=each.eos_id, spec=spec)
        pair.append([completion.token_ids for completion in result.completions])
    assert pair[0] == pair[1]
    if mode == "speculative":
        plain_options = DecodeOptions("autoregressive", 12, 3)
        result = decode(each.model, prompts, plain_options, eos_id=each.eos_id, spec=spec)
        assert pair[0] == [completion.token_ids for completion in result.completions]
