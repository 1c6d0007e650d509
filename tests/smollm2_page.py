"""What the steps of `tests.smollm2` found, as figures, and the page of these figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import kendalltau

from recbole_dgr2.report.benchmark_page import markdown

MIB = 2**20
SUPERVISED = ("ar_teacher", "conversion")
STAGES = (*SUPERVISED, "distillation", "reinforcement")
KINDS = ("frozen", "trained", "gradients", "optimizer", "other")
NAMES = {
    "train_loss": "loss",
    "train_divergence": "KL from the teacher",
    "train_agreement": "agreement with the teacher",
    "rollout_reward": "reward of the rollouts",
    "rollout_valid_rate": "valid rollouts",
    "rollout_groups": "groups with unequal rewards",
}
INTRODUCTION = (
    "A pretrained model of 135 million parameters through every stage on one processor core that other work shares: "
    "whether the parts hold together, and what they cost. A few steps a stage are no training to judge accuracy by, so "
    "no accuracy is shown. Data: beauty-small (609 users, 300 items), 4 candidates of ItemKNN, prompts with semantic "
    "IDs in the form of `gr2` (`tests/smollm2.yaml`: its instructions shortened), LoRA of rank 8, float32; all options "
    "are in the JSON file."
)


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the page."""
    rankings, held = found["rankings"], memory(found)
    return {
        "prompt_tokens": statistics.mean(rankings["prompt_tokens"]),
        "stages": {
            name: {
                "history": [
                    {figure: value for figure, value in epoch.items() if figure in NAMES}
                    for epoch in found[name]["history"]
                ],
                "seconds": found[name]["seconds"],
            }
            for name in STAGES
        },
        "memory": held,
        "speculative": found["speculative"],
        "speed": found["speed"],
        "bfloat16": {
            name: agreement(each) for name, each in (("SmolLM2", rankings), ("embedded", found["toy"]))
        },
        "export": found["export"],
        "example": rankings["example"],
    }


def memory(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes held and peaks of the stages that train with one backbone, and of a distillation that reads a second."""
    entries = {
        name: {"held": found[step]["held"], "peak": found[step]["peak"]}
        for name, step in (
            ("conversion", "conversion"),
            ("distillation, teacher ar_teacher", "distillation"),
            ("distillation, teacher conversion", "two_backbones"),
        )
    }
    conversion, student, _ = entries.values()
    one = student["held"]["frozen"] + student["held"]["optimizer"]
    return {
        "stages": entries,
        "held_to_backbone_and_optimizer": sum(student["held"].values()) / one,
        "held_to_conversion": sum(student["held"].values()) / sum(conversion["held"].values()),
        "peak_to_conversion": student["peak"] / conversion["peak"],
    }


def agreement(found: Mapping[str, Any]) -> dict[str, Any]:
    """How far the rankings under bfloat16 autocast are those of float32."""
    one, other = found["float32"], found["bfloat16"]
    orders = list(zip(one["orders"], other["orders"], strict=True))
    taus = [float(kendalltau(_places(a), _places(b)).statistic) for a, b in orders if len(a) > 1]
    return {
        "prompts": len(orders),
        "equal_texts": _share(zip(one["tokens"], other["tokens"], strict=True)),
        "equal_rankings": _share(orders),
        "equal_first": _share((a[0], b[0]) for a, b in orders),
        "kendall_tau": statistics.mean(taus),
        "valid": [statistics.mean(each["valid"]) for each in (one, other)],
        "moved": statistics.mean(list(order) != sorted(order) for order in one["orders"]),
        "seconds": [each["seconds"] for each in (one, other)],
    }


def _places(order: Sequence[int]) -> list[int]:
    return [list(order).index(slot) for slot in range(len(order))]


def _share(pairs: Any) -> float:
    return statistics.mean(a == b for a, b in pairs)


def page(content: Mapping[str, Any]) -> str:
    """The page of a measurement, from the content of its JSON file."""
    parts = (_stages, _memory, _decoding, _precision, _export)
    lines = ["# SmolLM2-135M-Instruct", "", INTRODUCTION]
    for part in parts:
        lines += ["", *part(content)]
    versions = ", ".join(f"{name} {value}" for name, value in content["versions"].items())
    lines += [
        "",
        "```",
        content["command"],
        "```",
        "",
        f"Hardware: {content['hardware']}",
        "",
        f"Versions: {versions}",
    ]
    return "\n".join(lines) + "\n"


def _stages(content: Mapping[str, Any]) -> list[str]:
    rows = [["stage", "figure", "by epoch or iteration", "seconds (wall)"]]
    for stage, entry in content["stages"].items():
        for figure, words in NAMES.items():
            values = [epoch[figure] for epoch in entry["history"] if figure in epoch]
            if values:
                rows.append(
                    [stage, words, " → ".join(f"{value:.3g}" for value in values), f"{entry['seconds']:.0f}"]
                )
    return [
        "## Stages",
        "",
        *markdown(rows),
        "",
        "Loss: mean of an epoch. An iteration learns from new answers of the student. Reinforcement learning takes its "
        "steps on groups of answers with unequal rewards; after a conversion as short as this one there may be none, "
        "and then the stage is run through without a step (loss 0).",
    ]


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


def _memory(content: Mapping[str, Any]) -> list[str]:
    found = content["memory"]
    rows = [["stage", *KINDS, "held", "peak of the process"]]
    for name, entry in found["stages"].items():
        held = entry["held"]
        rows.append(
            [name, *(_mib(held[kind]) for kind in KINDS), _mib(sum(held.values())), _mib(entry["peak"])]
        )
    return [
        "## Memory",
        "",
        "MiB. Held: all tensors that are alive when the optimizer steps, by storage, at most over the stage's steps "
        "(frozen: the backbone; trained: adapter and rows of new tokens; other: buffers and batch). Peak: largest "
        "resident memory of the process of the stage, Python, activations and logits among it; one example a "
        "forward pass.",
        "",
        *markdown(rows),
        "",
        f"With the teacher `ar_teacher`, which is the student with its adapter off, the distillation holds "
        f"{found['held_to_backbone_and_optimizer']:.3f} times what one backbone and the optimizer's state take, and "
        f"{found['held_to_conversion']:.3f} times what the conversion holds; its peak is "
        f"{found['peak_to_conversion']:.3f} times that of the conversion. `distillation_teacher: conversion` (the "
        "default) reads a second backbone.",
    ]


def _decoding(content: Mapping[str, Any]) -> list[str]:
    drafts, timed = content["speculative"], content["speed"]
    rows = [["mode", "tokens a pass", "speed against AR", "ms a token (processor)", "equal to AR"]]
    for name, entry in timed["modes"].items():
        numbers = [f"{entry['tokens_per_pass']:.2f}", f"{entry['speedup']:.2f}x"]
        equal = f"{entry['equal']} of {timed['prompts']}"
        rows.append([name, *numbers, f"{1e3 * entry['seconds_per_token']:.0f}", equal])
    reason = timed["modes"]["auto"]["reason"]
    return [
        "## Decoding",
        "",
        f"Speculative decoding gave the autoregressive tokens for {drafts['equal']} of {drafts['prompts']} prompts "
        f"({drafts['new_tokens']} tokens each, several rows a batch): {drafts['tokens_per_pass']:.2f} tokens a pass, "
        f"{100 * drafts['acceptance']:.0f} % of the verified drafts stood.",
        "",
        f"Batch 1, {timed['prompts']} prompts of {content['prompt_tokens']:.0f} tokens on average, "
        f"{timed['new_tokens']} tokens each, blocks of 16, processor time without prefill:",
        "",
        *markdown(rows),
        "",
        f"What `auto` said after its tries and these prompts, on which ways that seem close still race: {reason}",
    ]


def _precision(content: Mapping[str, Any]) -> list[str]:
    names = [
        "prompts",
        "equal rankings",
        "equal first places",
        "Kendall tau",
        "equal answers",
        "valid",
        "reordered",
    ]
    rows = [["model", *names]]
    for name, entry in content["bfloat16"].items():
        shares = [
            f"{entry[key]:.2f}" for key in ("equal_rankings", "equal_first", "kendall_tau", "equal_texts")
        ]
        valid = " / ".join(f"{value:.2f}" for value in entry["valid"])
        rows.append([name, str(entry["prompts"]), *shares, valid, f"{entry['moved']:.2f}"])
    seconds = content["bfloat16"]["SmolLM2"]["seconds"]
    copies = [name for name, entry in content["bfloat16"].items() if not entry["moved"]]
    note = f"{' and '.join(copies)}: every ranking is the retriever's order, so equal rankings say little there. "
    return [
        "## bfloat16 against float32",
        "",
        "Greedy autoregressive answers under bfloat16 autocast, which is what `precision: bf16` trains in, against "
        "those in float32. Valid: share of raw answers that are a permutation, float32 / bfloat16; reordered: share "
        "of float32 rankings that are not the retriever's order.",
        "",
        *markdown(rows),
        "",
        f"{note if copies else ''}SmolLM2's answers took {seconds[0]:.0f} s in float32 and {seconds[1]:.0f} s in "
        "bfloat16 (wall, shared core).",
    ]


def _export(content: Mapping[str, Any]) -> list[str]:
    found = content["export"]
    example = content["example"].strip().splitlines()
    return [
        "## Export",
        "",
        f"`{found['class']}` of plain transformers, in a process that cannot import this package, gave the "
        f"autoregressive text for {found['equal']} of {found['prompts']} prompts ({found['new_tokens']} tokens). A "
        "server on the loopback interface is tested with a tiny model (`tests/test_export.py`).",
        "",
        "An answer of the distilled student, of which all figures from decoding on are:",
        "",
        "```",
        *example,
        "```",
    ]
