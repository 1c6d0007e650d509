"""The steps of `tests.smollm2`: what each trains or measures, in the folder of one run."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recbole_dgr2 import quick_start
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.decode import DecodeOptions, DecodeResult
from recbole_dgr2.export import export
from recbole_dgr2.pipeline import stages
from recbole_dgr2.pipeline.open_run import open_run
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.work import Work, work_of
from recbole_dgr2.report.throughput import measure
from tests.test_export import ELSEWHERE
from tests.toy_run import ROOT, TINY

STAGES = ("ar_teacher", "conversion", "distillation", "reinforcement")
MEASURED = "distillation"
"""The stage whose student is decoded and exported: the last that needs no luck; reinforcement learning takes no step
where all answers to a list earn the same."""
LEARNING: dict[str, Any] = {"optimizer": "adamw", "train_batch_size": 1, "eval_step": 0}
SUPERVISED: dict[str, Any] = {**LEARNING, "learning_rate": 0.002, "warmup_ratio": 0.1}
OWN_ANSWERS: dict[str, Any] = {**LEARNING, "learning_rate": 0.0003}
OPTIONS: dict[str, Any] = {
    "show_progress": False,
    "use_gpu": False,
    "threads": 1,
    "cache_dir": None,
    "prompt": str(ROOT / "tests" / "smollm2.yaml"),
    "semantic_ids": "kmeans",
    "sid_codes": 32,
    "sid_levels": 2,
    "lora_rank": 8,
    "n_candidates": 4,
    "topk": [1, 3],
    "valid_metric": "NDCG@3",
    "n_facts": 1,
    "candidate_tokens": 32,
    "history_length": 2,
    "max_train_lists": 8,
    "n_drills": 0,
    "max_new_tokens": 120,
    "block_size": 16,
    "micro_batch_size": 1,
    "naive_row": False,
    "ar_teacher_epochs": 3,
    "conversion_epochs": 2,
    "distillation_teacher": "ar_teacher",
    "distillation_epochs": 2,
    "distillation_prompts": 2,
    "distillation_samples": 1,
    "reinforcement_iterations": 1,
    "reinforcement_groups": 1,
    "reinforcement_group_size": 2,
    "reinforcement_max_draws": 3,
    **{f"{stage}_{key}": value for stage in STAGES[:2] for key, value in SUPERVISED.items()},
    **{f"{stage}_{key}": value for stage in STAGES[2:] for key, value in OWN_ANSWERS.items()},
}
MORE: dict[str, dict[str, Any]] = {"ar_teacher": {"max_train_lists": 16}}
TOY: dict[str, Any] = {
    **TINY,
    "stages": ["ar_teacher", "conversion"],
    "max_new_tokens": 100,
    "max_train_lists": 600,
}
TOY |= {
    "embedded_hidden_size": 64,
    "embedded_num_layers": 2,
    "n_drills": 0,
    "ar_teacher_epochs": 3,
    "naive_row": False,
}
PROMPTS, BATCH = 50, 25
NEW = 32
"""Tokens of an answer where drafts are verified and speed is measured."""
TIMED, TRIED, ROUNDS = 4, 12, 1
"""Prompts whose decoding is timed, prompts on which `auto` tries its ways first, and rounds."""
MODES: dict[str, dict[str, Any]] = {
    "autoregressive": {"mode": "autoregressive"},
    "block, tau 0.9": {"mode": "block", "tau": 0.9},
    "block, tau 0.6": {"mode": "block", "tau": 0.6},
    "speculative": {"mode": "speculative"},
    "auto": {"mode": "auto"},
}


def most_held(found: dict[str, int]) -> Callable[..., None]:
    """A hook of all optimizers, called before each step: bytes of all live tensors by kind, where they are most."""

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kinds: dict[str, dict[int, int]] = {
            name: {} for name in ("optimizer", "trained", "gradients", "frozen", "other")
        }
        kept = [value for state in optimizer.state.values() for value in state.values()]
        _count(kinds["optimizer"], [value for value in kept if isinstance(value, torch.Tensor)])
        live = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        parameters = [each for each in live if isinstance(each, torch.nn.Parameter)]
        _count(kinds["trained"], [each for each in parameters if each.requires_grad])
        _count(kinds["gradients"], [each.grad for each in parameters if each.grad is not None])
        _count(kinds["frozen"], [each for each in parameters if not each.requires_grad])
        _count(kinds["other"], live)
        known = set().union(*(kinds[name] for name in kinds if name != "other"))
        kinds["other"] = {place: size for place, size in kinds["other"].items() if place not in known}
        sizes = {name: sum(places.values()) for name, places in kinds.items()}
        if sum(sizes.values()) > sum(found.values()):
            found.update(sizes)

    return look


def _count(places: dict[int, int], tensors: Sequence[torch.Tensor]) -> None:
    """Adds the memory of tensors, each piece of it once."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            places[storage.data_ptr()] = storage.nbytes()


def peak() -> int:
    """Largest resident memory of this process so far, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def train(stage: str, folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """One stage by the whole pipeline, from what the folder holds of the stages before; nothing is assessed."""
    held: dict[str, int] = {}
    hook = register_optimizer_step_pre_hook(most_held(held))
    run = stages.run_stages
    with (
        mock.patch.object(stages, "_assessed", lambda *_: None),
        mock.patch.object(stages, "run_stages", lambda *parts: run(*parts) and []),
    ):
        given = {**OPTIONS, **keys, "run_dir": str(folder), "stages": [stage]}
        report = quick_start.run_recbole_dgr2(dataset="beauty-small", config_dict=given)
    hook.remove()
    info = json.loads((folder / stage / "dgr2.json").read_text(encoding="utf-8"))
    return {
        "history": info["data"]["training"]["history"],
        "seconds": report["phases"][stage],
        "held": held,
        "peak": peak(),
    }


def opened(folder: Path, stage: str) -> tuple[LanguageModelReranker, Work]:
    """A stage of a finished run, and random test lists of it."""
    run = open_run(folder, show_progress=False)
    reranker = run.language_model(stage)
    return reranker, work_of(run, reranker, PROMPTS, run.config["seed"]).users


def rankings(folder: Path, stage: str) -> dict[str, Any]:
    """The answers to `PROMPTS` lists in float32 and under bfloat16 autocast, with the orders that they stand for."""
    reranker, work = opened(folder, stage)
    found: dict[str, Any] = {"prompt_tokens": [len(request.prompt_ids) for request in work.requests]}
    ways: dict[str, AbstractContextManager[Any]] = {
        "float32": nullcontext(),
        "bfloat16": torch.autocast("cpu", torch.bfloat16),
    }
    for name, way in ways.items():
        options = DecodeOptions("autoregressive", reranker.options.max_new_tokens, BATCH)
        with way:
            done = reranker.with_options(options).decode(work.requests)
        texts = reranker.texts(done)
        ranked = [
            parse_ranking(text, n, completion.finished)
            for text, n, completion in zip(texts, work.candidates, done.completions, strict=True)
        ]
        found[name] = {
            "tokens": [completion.token_ids for completion in done.completions],
            "orders": [ranking.order for ranking in ranked],
            "valid": [ranking.valid for ranking in ranked],
            "seconds": done.decode_seconds,
        }
    found["example"] = texts[0]
    return found


def speculative(folder: Path, stage: str, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Speculative decoding of the same lists against the first tokens of their autoregressive answers."""
    reranker, work = opened(folder, stage)
    done = reranker.with_options(DecodeOptions("speculative", NEW, BATCH)).decode(work.requests)
    expected = [tuple(answer[:NEW]) for answer in tokens]
    equal = [own.token_ids == other for own, other in zip(done.completions, expected, strict=True)]
    return {
        "prompts": len(equal),
        "equal": sum(equal),
        "new_tokens": NEW,
        "tokens_per_pass": done.tokens_per_forward,
        "acceptance": done.acceptance_rate,
    }


def speed(folder: Path, stage: str) -> dict[str, Any]:
    """Every mode at batch 1 on a few lists in turn; by processor time, since other work may share the cores."""
    reranker, work = opened(folder, stage)

    def decoder(options: DecodeOptions) -> Callable[[Any], DecodeResult]:
        return reranker.with_options(options).decode

    base = DecodeOptions("autoregressive", NEW, 1)
    decoders = {name: decoder(replace(base, **changes)) for name, changes in MODES.items()}
    with mock.patch.object(time, "perf_counter", time.process_time):
        decoders["auto"](work.requests[TIMED : TIMED + TRIED])
        timed = measure(
            decoders, work.requests[:TIMED], baseline="autoregressive", rounds=ROUNDS, warmup_requests=1
        )
    baseline = [one.token_ids for one in timed["autoregressive"].outcome.completions]
    return {
        "prompts": TIMED,
        "new_tokens": NEW,
        "modes": {
            name: {
                "tokens_per_pass": one.tokens_per_forward,
                "speedup": one.speedup,
                "seconds_per_token": one.seconds / one.tokens,
                "equal": sum(
                    a.token_ids == b for a, b in zip(one.outcome.completions, baseline, strict=True)
                ),
                "reason": one.outcome.reason,
            }
            for name, one in timed.items()
        },
    }


def exported(folder: Path, stage: str, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The exported stage in a process of plain transformers, in which this package cannot be imported."""
    reranker, work = opened(folder, stage)
    out = export(folder, stage, folder.parent / "exported")
    prompts = [list(request.prompt_ids) for request in work.requests[:TIMED]]
    words = [sys.executable, "-c", ELSEWHERE, str(out), json.dumps(prompts)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder.parent, check=True)
    found = json.loads(done.stdout)
    decoder = reranker.backbone.tokenizer
    expected = [decoder.decode(answer[:24]) for answer in tokens[:TIMED]]
    return {
        "class": found["class"],
        "prompts": len(prompts),
        "new_tokens": 24,
        "equal": sum(own == other for own, other in zip(found["texts"], expected, strict=True)),
    }


def toy(folder: Path) -> dict[str, Any]:
    """The embedded model on the toy data set."""
    given = {**TOY, "run_dir": str(folder)}
    quick_start.run_recbole_dgr2(dataset="toy", config_dict=given)
    return rankings(folder, "conversion")
