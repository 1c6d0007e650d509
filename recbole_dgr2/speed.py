"""Speed of the decoders against one another, on a trained model and its own prompts.

python -m recbole_dgr2.speed --run_dir=saved/Amazon_Beauty-ItemKNN-2020 --output=results

All decoders run in turn in one process on the same requests; every speed stands beside the quality of the same outputs.
Written into the output folder: speed.json, speed.md, PNG plots, and speed_trace.html, one decode of each mode pass by
pass.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recbole_dgr2.decode import DecodeOptions
from recbole_dgr2.decode.costs import measure_pass_costs
from recbole_dgr2.model.forward import compile_passes
from recbole_dgr2.pipeline.bench import AR, GENERATE, Bench
from recbole_dgr2.pipeline.open_run import OpenRun, changed_options, open_run
from recbole_dgr2.pipeline.run import hardware, library_versions
from recbole_dgr2.pipeline.work import Lists, work_of
from recbole_dgr2.report.speed_page import write_page
from recbole_dgr2.report.trace_view import print_view
from recbole_dgr2.system.command import Arguments, comma_separated, command, command_parser
from recbole_dgr2.system.threads import use_threads

OUTPUTS = (16, 32, 64, 128)
AUTO = ("auto", "auto any")


def run(bench: Bench, lists: Lists, options: argparse.Namespace) -> dict[str, Any]:
    """All sweeps; plain values."""
    few = lists.hits.first(options.requests) if lists.hits.requests else lists.users.first(options.requests)
    lengths = [length for length in options.blocks if length <= bench.spec.block_size]
    taus = [f"block {tau:g}" for tau in options.taus]
    exact = [AR, "speculative"] if bench.spec.context == "causal" else [AR]  # drafts need a causal stream
    drafts = [f"speculative {length}" for length in lengths] if len(exact) > 1 else []
    shorter_drafts = [name for name in drafts if name != f"speculative {bench.spec.block_size}"]
    shorter = [f"block 0.9/{length}" for length in lengths if length < bench.spec.block_size]
    outside = [] if options.no_generate else [GENERATE]
    checked = [*exact, *taus, *options.rules, *shorter]
    tables: dict[str, list[dict[str, Any]]] = {}
    tables["modes"] = bench.entries(
        [AR, *outside, *taus, *options.rules, *shorter, *exact[1:], *drafts, *AUTO], few, bench.base
    )
    tables["batch"], costs = [], []
    for batch in options.batches:
        names = [AR, *outside, "block 0.9", *shorter, "synchronised 0.9", *exact[1:], *shorter_drafts, *AUTO]
        work = lists.users.first(max(4 * batch, options.requests))
        tables["batch"] += bench.entries(names, work, replace(bench.base, batch_size=batch))
        longest = max(len(request.prompt_ids) for request in few.requests)
        costs.append(asdict(measure_pass_costs(bench.backbone.model, batch, longest)))
    tables["output"] = []
    for length in options.outputs:
        cut = replace(bench.base, max_new_tokens=length)
        tables["output"] += bench.entries([AR, "block 0.9", *exact[1:]], few, cut, output=length)
    return {
        "quality": bench.qualities(checked, lists.first(options.users), max(options.batches))
        if options.users
        else [],
        "tables": tables,
        "costs": costs,
        "inputs": [bench.after(length, tables["modes"]) for length in options.inputs],
    }


def _bench(opened: OpenRun, options: argparse.Namespace) -> tuple[Bench, Lists]:
    reranker = opened.language_model(options.stage)
    if reranker.spec is None:
        raise ValueError(f"stage {options.stage!r} is autoregressive: there is one way to decode it")
    if options.compile:
        compile_passes(reranker.backbone.model)
    most = opened.config["max_new_tokens"]
    if options.outputs is None:
        options.outputs = [length for length in OUTPUTS if length <= most]
    for length in options.outputs:
        if not 2 <= length <= most:
            raise ValueError(f"--outputs {length}: expected 2 to {most}, the run's max_new_tokens")
    base = DecodeOptions(AR, most, 1, seed=opened.config["seed"])
    lists = work_of(
        opened, reranker, max(options.users, options.requests, 4 * max(options.batches)), base.seed
    )
    return Bench(reranker.backbone, reranker.spec, base, options.rounds), lists


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    use_threads(options.threads)
    changes = {"data_path": options.data_path} if options.data_path else {}
    opened = open_run(options.run_dir, show_progress=False, **changes)
    bench, lists = _bench(opened, options)
    result = run(bench, lists, options)
    shown = [AR, "block 0.9", "speculative"] if bench.spec.context == "causal" else [AR, "block 0.9"]
    views = bench.views(lists.users.requests[0], shown)
    given = sys.argv[1:] if arguments is None else arguments
    about = {
        "command": " ".join(["python -m recbole_dgr2.speed", *given]),
        "model": f"Stage {options.stage}, {bench.backbone.model.num_parameters():,} parameters",
        "dataset": opened.config["dataset"],
        "retriever": opened.source.name,
        "options": changed_options(opened),
        "seed": bench.base.seed,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "versions": library_versions(),
    }
    print(write_page({**about, **result}, views, options.output))
    for view in views[1:]:
        print_view(view)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("speed", __doc__)
    add, floats, whole = parser.add_argument, comma_separated(float), comma_separated(int)
    add("--run_dir", type=Path, required=True, help="folder of a finished run")
    add(
        "--output",
        type=Path,
        required=True,
        help="folder for speed.json, speed.md, plots and speed_trace.html",
    )
    add("--stage", default="conversion", help="stage of the run to decode (default: conversion)")
    add("--data_path", help="folder of data sets, where it is no longer where the run found it")
    add(
        "--users",
        type=int,
        default=1000,
        help="random users, and hits, whose quality is measured (default: 1000)",
    )
    add("--requests", type=int, default=40, help="hits timed at batch 1 (default: 40)")
    add("--rounds", type=int, default=3, help="times each decoder goes through its prompts (default: 3)")
    add("--taus", type=floats, default=[0.4, 0.6, 0.9, 0.99], help="thresholds, comma-separated")
    add("--blocks", type=whole, default=[8, 16, 32], help="block and draft lengths, comma-separated")
    rules = ["block factor=1", "block entropy=0.3", "block static=8"]
    add(
        "--rules",
        type=comma_separated(str),
        default=rules,
        help="further commit rules, such as 'block factor=1'",
    )
    add("--batches", type=whole, default=[1, 4, 16, 64], help="batch sizes, comma-separated")
    add(
        "--outputs",
        type=whole,
        help=f"output lengths, comma-separated (default: {OUTPUTS}, where allowed)",
    )
    inputs = [32, 128, 512, 2048, 4096]
    add("--inputs", type=whole, default=inputs, help="input lengths, comma-separated")
    add("--threads", type=int, default=0, help="torch threads, 0: measured (default: 0)")
    compiled = "compile the forward pass (minutes at first), for all decoders alike"
    add("--compile", action="store_true", help=compiled)
    add("--no_generate", action="store_true", help="leave out Hugging Face generate, the outside reference")
    return parser


if __name__ == "__main__":
    sys.exit(main())
