"""The memory command: sizes from a config alone, against what is really there; and the ready configs it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from recbole_dgr2 import memory
from recbole_dgr2.memory import Lengths, needs, read
from recbole_dgr2.model.backbone import EmbeddedSpec
from recbole_dgr2.model.outline import activations, embedded_outline, outline_of
from recbole_dgr2.system.paths import properties_dir
from tests.launched import finished
from tests.tiny import ARCHITECTURES, tiny_backbone, tiny_model

PROPERTIES = properties_dir()
SCALES = sorted((PROPERTIES / "scale").glob("*.yaml"))
LAUNCHES = sorted((PROPERTIES / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outline_counts_what_a_model_has(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.config.save_pretrained(tmp_path)
    found = outline_of(str(tmp_path))
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.rows, found.layers, found.hidden) == (96, 2, 32)
    assert found.cached == 2 * 2 * 2 * 8  # keys and values, layers, heads, width
    assert found.adapters(4, ("q_proj",)) == 2 * 4 * (32 + 32)
    spec = EmbeddedSpec(architecture, 32, 2, 4, 2, 64, 320, 512)  # type: ignore[arg-type]
    own = tiny_backbone(architecture).model
    assert embedded_outline(spec).parameters == sum(p.numel() for p in own.parameters())


def test_activations_grow_as_they_must() -> None:
    outline = embedded_outline(EmbeddedSpec(hidden_size=32, num_layers=4, intermediate_size=64))
    one, two = (activations(outline, batch, 40, False, False) for batch in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.05)
    assert activations(outline, 2, 40, False, True) < two / 2
    assert torch.nn.functional.scaled_dot_product_attention.__module__ != "recbole_dgr2.model.outline"


def test_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--stages=[ar_teacher, conversion]", "--embedded_hidden_size=32", "--prompt_tokens=100"]
    assert memory.main([*words, "--answer_tokens=20", "--device=cpu", f"--output={tmp_path / 'm.json'}"]) == 0
    table = capsys.readouterr().out
    assert "ar_teacher" in table and "peak GiB" in table and "reinforcement" not in table
    teacher, conversion = json.loads((tmp_path / "m.json").read_text())
    assert (teacher["row_tokens"], teacher["step_tokens"], teacher["rows"]) == (120, 960, 8)
    assert conversion["row_tokens"] == 100 + 3 * 32
    assert teacher["gradients"] == teacher["weights"] < teacher["peak"]


def test_adapters_spare_gradients_optimizer_and_the_teacher() -> None:
    lengths = Lengths(100, 20, 1, True)
    whole, spare = (
        needs(read([], ["--stages=[distillation]", f"--lora_rank={rank}"]), lengths)[0] for rank in (0, 4)
    )
    assert spare.weights < 0.7 * whole.weights and spare.optimizer < 0.2 * whole.optimizer


@pytest.mark.parametrize(
    ("word", "message"),
    [("--tua=0.5", "nearest is 'tau'"), ("--tau=2", "tau: expected"), ("tau", "expected --key=value")],
)
def test_bad_option_is_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main([word]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_backbone_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main([f"--backbone={tmp_path / 'none'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "prompt", "answer", "changes"),
    [
        ("ar_teacher", 200, 56, {}),
        ("conversion", 120, 40, {"gradient_checkpointing": True, "micro_batch_size": 4}),
    ],
)
def test_estimate_is_near_the_measured_peak(
    stage: str, prompt: int, answer: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    given = {"stage": stage, "prompt": prompt, "answer": answer, **changes}
    out = finished(["-m", "tests.memory_program", json.dumps(given)], 1, tmp_path)[0]
    measured = int(out.split()[-1])
    shape = {
        "hidden_size": 128,
        "num_layers": 3,
        "num_kv_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 320,
    }
    own = {
        f"{stage}_train_batch_size": 8,
        f"{stage}_optimizer": "adamw",
        "block_size": 8,
        "decode_batch_size": 1,
    }
    values = {**{f"embedded_{name}": value for name, value in shape.items()}, **own, **changes}
    options = read([], [f"--stages=[{stage}]", *(f"--{key}={value}" for key, value in values.items())])
    estimate = needs(options, Lengths(prompt, answer, 1, True))[0].peak
    assert estimate == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("path", SCALES, ids=lambda path: path.stem)
def test_ready_config_has_known_keys_in_range(path: Path) -> None:
    options = read([str(path)], [])
    assert options["lora_rank"] and options["precision"] == "bf16" and options["gradient_checkpointing"]
    assert options["backbone"].startswith("Qwen/Qwen3-")


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_ready_launch_is_read_by_accelerate(path: Path) -> None:
    """As many processes as its name says; in each of them the whole model, or with FSDP its share."""
    config = load_config_from_file(str(path))
    kind = "FSDP" if path.stem.endswith("_fsdp") else "MULTI_GPU"
    assert config.distributed_type == kind and config.num_processes == int(path.stem.split("_")[1])
    assert config.mixed_precision == "no"
