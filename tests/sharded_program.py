"""What tests run in processes that share the weights out: every kind of stage, killed and resumed. Prints JSON.

python -m tests.sharded_program FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from recbole_dgr2.decode import DecodeOptions
from recbole_dgr2.system import processes
from recbole_dgr2.trainer import ARTeacher
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import BaseTeacher
from tests import adapting, distilling
from tests.process_program import learnt, on_policy, supervised
from tests.tiny import tiny_backbone
from tests.training import OPTIONS, TRAIN, VALID, Killed

DEATHS = {"supervised": 6, "on_policy": 2, "adapted": 3}


def adapted(folder: Path, lives: int) -> dict[str, Any]:
    """Distillation of an adapter from the base below it, layers recomputed; batches differ in their passes."""
    with processes.main_first():
        student, spec = adapting.converted(folder.with_name("base"))
    own = replace(distilling.OWN, all_mask_share=0.5)
    decoding = DecodeOptions("block", 11, 8, tau=0.01, temperature=1.0, seed=7)
    options = replace(OPTIONS, train_batch_size=3, gradient_checkpointing=True, save_step=1)
    stage = distilling.Mortal(Roller(student, spec, decoding), options, {}, BaseTeacher(student), own)
    stage.lives = lives
    stage.fit(TRAIN[:4], TRAIN[4:6], folder)
    return learnt(stage, folder)


STAGES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "supervised": supervised,
    "on_policy": on_policy,
    "adapted": adapted,
}


def best_early(folder: Path) -> dict[str, Any]:
    """The best epoch is not the last. Also, after a step: shares of weights, gradients and optimizer state in this
    process, and what the stage's own model holds."""
    stage = ARTeacher(tiny_backbone(), replace(OPTIONS, epochs=3, learning_rate=0.1), {})
    found: dict[str, Any] = {}

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        states = [optimizer.state[weight]["exp_avg"] for weight in weights]
        kinds = {"weights": weights, "gradients": [w.grad for w in weights], "states": states}
        total = sum(weight.numel() for weight in weights)
        found.update({kind: sum(map(_here, each)) / total for kind, each in kinds.items()})
        own = list(stage.backbone.model.parameters())
        found["empty"] = all(bool(weight.isnan().all()) for weight in own)
        found["stored"] = sum(weight.untyped_storage().nbytes() for weight in own)

    handle = register_optimizer_step_post_hook(count)
    stage.fit(TRAIN[:6], VALID[:3], folder)
    handle.remove()
    return {"held": found, **learnt(stage, folder)}


def _here(tensor: Any) -> int:
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel())


def refused(folder: Path) -> str:
    """What is said of muon."""
    try:
        ARTeacher(tiny_backbone(), replace(OPTIONS, optimizer="muon"), {}).fit(TRAIN[:4], [], folder)
    except ValueError as error:
        return str(error)
    return ""


def killed_and_resumed(name: str, folder: Path) -> dict[str, Any]:
    """The stage dies at a batch, and is begun again."""
    killed = dead(name, folder / name)
    return {"killed": killed, **STAGES[name](folder / name, 0)}


def dead(name: str, folder: Path) -> bool:
    """Whether the stage died and left a state behind, in all processes."""
    try:
        STAGES[name](folder, DEATHS[name])
        return False
    except Killed:
        left = folder.with_name(f"{folder.name}.partial").is_dir() and not folder.exists()
        return all(processes.gather(left))


def main(folder: str) -> None:
    torch.set_num_threads(1)
    processes.start()
    place = Path(folder)
    found: dict[str, Any] = {name: killed_and_resumed(name, place) for name in STAGES}
    found |= {"early": best_early(place / "early"), "muon": refused(place / "muon")}
    found["crossing"] = dead("supervised", place / "crossing")
    everything = processes.gather(found)
    if processes.is_main():
        print(json.dumps(everything))
    processes.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
