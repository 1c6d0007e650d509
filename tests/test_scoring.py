"""Ways to spend less memory that change no number: logits in chunks, layers computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recbole_dgr2.data.examples import collate
from recbole_dgr2.model import forward
from recbole_dgr2.model.forward import recomputed
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.trainer import Conversion, convert
from recbole_dgr2.trainer.batches import generators
from tests.tiny import ARCHITECTURES, tiny_backbone
from tests.training import OPTIONS, TRAIN, fitted, same


def gradients(architecture: str, recompute: bool = False) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Loss and metrics of the conversion, under its 4D masks, and the gradients of all weights."""
    backbone, spec = convert(tiny_backbone(architecture), 4, "causal")
    stage = Conversion(backbone, OPTIONS, {}, spec, NoiseOptions(), 1.0)
    backbone.model.train()
    batch = collate(TRAIN[:5], backbone.pad_id)
    with recomputed(backbone.model, recompute):
        loss, metrics = stage.loss(batch, generators(0, 0, range(5)))
        loss.backward()
    found = {name: p.grad for name, p in backbone.model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(backbone.model.parameters()))
    return {**metrics, "loss": float(loss.detach())}, found


@pytest.mark.parametrize("slots", [1, 3, 1000])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_in_chunks_change_nothing(
    architecture: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, wanted = gradients(architecture)
    monkeypatch.setattr(forward, "CHUNK", slots * tiny_backbone().rows)
    chunked, found = gradients(architecture)
    assert chunked == pytest.approx(whole, rel=1e-6)
    for name, gradient in wanted.items():  # float32 sums in another order
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_no_more_logits_than_a_chunk_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that autograd keeps does not grow with the scored slots."""
    rows, kept = tiny_backbone().rows, [0]
    monkeypatch.setattr(forward, "CHUNK", 2 * rows)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 2 and tensor.shape[1] == rows:
            kept[0] = max(kept[0], len(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients("qwen3")
    assert kept[0] <= 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_computed_again_change_no_gradient(architecture: str) -> None:
    whole, wanted = gradients(architecture)
    again, found = gradients(architecture, recompute=True)
    assert again == pytest.approx(whole, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)


def test_a_stage_computes_layers_again_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    calls: list[int] = []
    original = torch.utils.checkpoint.checkpoint

    def counted(*values: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.checkpoint", counted)
        found = fitted(tmp_path / "less", gradient_checkpointing=True)
    assert calls
    assert same(found, fitted(tmp_path / "more"))
