"""Trains a stage of an embedded model for two steps and prints the peak of torch's CPU allocations, in bytes.

python -m tests.memory_program '{"stage": "ar_teacher", ...}'
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from recbole_dgr2.data.examples import Example
from recbole_dgr2.model.backbone import EmbeddedSpec, build_embedded
from recbole_dgr2.model.noise import NoiseOptions
from recbole_dgr2.trainer import ARTeacher, Conversion, convert
from tests.tiny import tiny_tokenizer
from tests.training import OPTIONS

BATCH, LAYERS, HIDDEN, INTERMEDIATE, VOCAB, BLOCK = 8, 3, 128, 384, 320, 8


def examples(prompt: int, answer: int) -> list[Example]:
    """Two batches."""
    return [
        Example(
            i,
            tuple(2 + (i + j) % 200 for j in range(prompt)),
            (*(5 + i * j % 90 for j in range(answer - 1)), 1),
            answer // 2,
        )
        for i in range(2 * BATCH)
    ]


def train(stage: str, changes: dict[str, Any], rows: list[Example]) -> None:
    """The whole training of one stage, its model included."""
    spec = EmbeddedSpec(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_kv_heads=2,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCAB,
    )
    backbone = build_embedded(spec, tiny_tokenizer(), 0)
    options = replace(OPTIONS, epochs=1, train_batch_size=BATCH, eval_step=0, save_step=0, **changes)
    made: Any = ARTeacher
    if stage == "conversion":
        backbone, converted = convert(backbone, BLOCK, "causal")
        made = Conversion(backbone, options, {}, converted, NoiseOptions(), 1.0)
    else:
        made = ARTeacher(backbone, options, {})
    with tempfile.TemporaryDirectory() as folder:
        made.fit(rows, [], Path(folder) / "stage")


def main(stage: str, prompt: int, answer: int, **changes: Any) -> None:
    torch.set_num_threads(1)
    rows = examples(prompt, answer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        train(stage, changes, rows)
    now = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    print(most)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
