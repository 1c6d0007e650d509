"""What tests run in one process and in several: stages on tiny models, and exchanges. Prints JSON.

python -m tests.process_program FOLDER STAGE [deaths]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.system import processes
from recbole_dgr2.trainer import Reinforcement
from recbole_dgr2.trainer.state import fingerprint_weights
from tests import rolling
from tests.rolling import PROMPTS, make, mortal
from tests.tiny import tiny_backbone
from tests.training import OPTIONS, TRAIN, VALID, Killed, Mortal


def supervised(folder: Path, lives: int) -> dict[str, Any]:
    """18 examples in batches of 4: the last batch leaves a second process without examples of its own."""
    stage = Mortal(tiny_backbone(), replace(OPTIONS, train_batch_size=5, micro_batch_size=1), {"n": 10})
    stage.lives = lives
    stage.fit(TRAIN[:16], VALID[:5], folder)
    return learnt(stage, folder)


def on_policy(folder: Path, lives: int) -> dict[str, Any]:
    """Three groups of three answers an iteration, drawn of five prompts."""
    own = replace(rolling.POLICY, sampling=replace(rolling.SAMPLING, groups=3, samples=3))
    stage = make(mortal(Reinforcement), "block", own=own, train_batch_size=4)
    stage.lives = lives
    stage.fit(PROMPTS[:5], PROMPTS[:3], folder)
    return learnt(stage, folder)


def learnt(stage: Any, folder: Path) -> dict[str, Any]:
    """History and weights; those of every process must be the same."""
    processes.require_same({"weights": fingerprint_weights(stage.backbone.model)}, "after training")
    history = load_stage(folder)[1].data["training"]["history"]
    total = sum(float(p.detach().double().abs().sum()) for p in stage.backbone.model.parameters())
    return {"history": history, "weights": total}


def exchanges() -> dict[str, Any]:
    """The functions of `processes` at odd sizes."""
    seen: list[int] = []

    def double(items: Sequence[int]) -> list[int]:
        seen.extend(items)
        return [2 * item for item in items]

    spread = [processes.spread(list(range(count)), double) for count in range(6)]
    main = processes.from_main(lambda: f"of process {processes.rank()}")
    try:
        processes.require_same({"a": 1, "rank": processes.rank() * (processes.world() > 1)}, "here")
        same = "same"
    except (ValueError, processes.Stopped) as error:
        same = str(error)
    try:
        with processes.main_first():
            if processes.is_main():
                raise KeyError("main")
        failed = "not seen"
    except (KeyError, processes.Stopped) as error:
        failed = type(error).__name__
    return {"spread": spread, "seen": seen, "main": main, "same": same, "failed": failed}


def tell(found: Any) -> None:
    """A line in one write: processes of a launcher share an unbuffered stream, and print writes the end apart."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main(folder: str, what: str, lives: str = "0") -> None:
    torch.set_num_threads(1)
    processes.start()
    if what == "exchanges":
        tell(exchanges())
    else:
        stage = {"supervised": supervised, "on_policy": on_policy}[what]
        try:
            found = stage(Path(folder) / what, int(lives))
        except Killed:
            tell("killed")
            return
        tell(found)
    processes.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
