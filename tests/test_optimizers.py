"""Optimizers of a stage: every weight is trained once, Muon's state survives a kill, and a torch without it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recbole_dgr2.trainer.optimizers import build_optimizers
from tests.tiny import tiny_backbone
from tests.training import OPTIONS, TRAIN, VALID, Killed, Mortal, fitted, same, weights

MUON = replace(OPTIONS, optimizer="muon")


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = tiny_backbone().model
    muon, adamw = build_optimizers(model.modules(), MUON).parts
    matrices = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == matrices
    assert {id(p) for group in adamw.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters() if id(p) not in matrices
    }


def test_the_parts_step_and_forget_together() -> None:
    model = tiny_backbone().model
    optimizers = build_optimizers(model.modules(), MUON)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizers.step()
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    optimizers.zero_grad()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_killed_and_resumed_with_muon_is_the_unbroken_run(tmp_path: Path) -> None:
    unbroken = fitted(tmp_path / "unbroken", optimizer="muon")
    broken = Mortal(tiny_backbone(), MUON, {"n": 10})
    broken.lives = 9
    with pytest.raises(Killed):
        broken.fit(TRAIN, VALID, tmp_path / "broken")
    resumed = Mortal(tiny_backbone(), MUON, {"n": 10})
    resumed.fit(TRAIN, VALID, tmp_path / "broken")
    assert same(weights(resumed.backbone), unbroken)
    assert not same(unbroken, fitted(tmp_path / "adamw"))


def test_a_torch_without_muon_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"optimizer muon: torch .* has none, expected 2\.9 or later"):
        build_optimizers(tiny_backbone().model.modules(), MUON)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer='sgd': expected adamw or muon"):
        replace(OPTIONS, optimizer="sgd")  # type: ignore[arg-type]
