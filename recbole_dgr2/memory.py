"""What a run needs of memory, stage by stage, before anything is loaded: from the model's config alone.

python -m recbole_dgr2.memory --backbone=Qwen/Qwen3-1.7B --config_files=properties/scale/gpu_24gb.yaml

Takes the options of a run as --key=value or in YAML files, and the lengths of prompts and answers. Sizes are those of
one process, peaks those of the second optimizer step on, when the optimizer has its state; what the framework itself
takes (on a GPU about 1 GB), and fragmentation, are not counted. With adapters, activations are those of all weights
being trained, which is a little too much. Nothing is taken off for sharding (FSDP): each process is counted whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recbole_dgr2.config import host_keys
from recbole_dgr2.schema import nearest, options_of, parse_text, read_yaml
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.system.command import Arguments, command, command_parser

FLOAT = 4
GIB = 2**30
CPU_MICRO_BATCH = 8


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of an answer; processes that share a batch; whether they run on CPUs."""

    prompt: int
    answer: int
    processes: int
    cpu: bool


@dataclass(frozen=True)
class Need:
    """One stage: rows of a pass, tokens of a row and of an optimizer step, and bytes of one process.

    weights: a second model as teacher included. activations: what a forward pass keeps, and what the backward pass of a
    layer adds to it. logits: where they are read; by the time of the layers they are gone. peak: while training, or
    while decoding if that takes more.
    """

    stage: str
    rows: int
    row_tokens: int
    step_tokens: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    cache: int
    peak: int


@dataclass(frozen=True)
class _Shape:
    """How a stage lays an answer out: tokens of a row, scored slots, float32 logits kept, teacher's weights."""

    tokens: int
    scored: int
    kept: int
    teacher: bool = False


def _shapes(options: dict[str, Any], lengths: Lengths) -> dict[str, _Shape]:
    """Layouts of the stages; `kept` counts vectors of the vocabulary, a row, 0 where they are read in chunks."""
    block, prompt, answer = options["block_size"], lengths.prompt, lengths.answer
    whole = -(-answer // block) * block
    copies = min(options["reinforcement_max_copies"], block - 1)
    return {
        "ar_teacher": _Shape(prompt + answer, answer, 0),
        "conversion": _Shape(prompt + 3 * whole, 2 * answer, 0),
        "distillation": _Shape(prompt + 2 * whole, 2 * answer, 2 * 2 * answer + answer, True),
        "reinforcement": _Shape(prompt + (1 + copies) * whole, answer, 4 * answer),
    }


def needs(options: dict[str, Any], lengths: Lengths) -> list[Need]:
    """What each stage of `options["stages"]` needs.

    Raises:
        ValueError: the backbone's config cannot be read.
    """
    from recbole_dgr2.model.backbone import EmbeddedSpec
    from recbole_dgr2.model.outline import embedded_outline, outline_of

    if options["backbone"] == "embedded":
        prefix = "embedded_"
        names = {key[len(prefix) :]: value for key, value in options.items() if key.startswith(prefix)}
        outline = embedded_outline(EmbeddedSpec(**names))
    else:
        outline = outline_of(options["backbone"])
    shapes = _shapes(options, lengths)
    return [
        _need(stage, shapes[stage], outline, options, lengths)
        for stage in shapes
        if stage in options["stages"]
    ]


def _need(stage: str, shape: _Shape, outline: Any, options: dict[str, Any], lengths: Lengths) -> Need:
    from recbole_dgr2.model.forward import CHUNK
    from recbole_dgr2.model.outline import activations

    batch = options[f"{stage}_train_batch_size"]
    share = -(-batch // lengths.processes)
    rows = min(share, options["micro_batch_size"] or (CPU_MICRO_BATCH if lengths.cpu else share))
    trained, matrices = outline.parameters, outline.matrices
    if options["lora_rank"] and not (options["backbone"] == "embedded" and stage == "ar_teacher"):
        targets = tuple(options["lora_targets"] or ())
        trained = matrices = outline.adapters(options["lora_rank"], targets)
    second = shape.teacher and not options["lora_rank"]  # the teacher is the same model without its adapter
    weights = FLOAT * (
        outline.parameters * (2 if second else 1) + (trained if trained != outline.parameters else 0)
    )
    muon = options[f"{stage}_optimizer"] == "muon"
    optimizer = FLOAT * (2 * trained - (matrices if muon else 0))
    gradients = FLOAT * trained
    kept = activations(
        outline, rows, shape.tokens, options["precision"] == "bf16", options["gradient_checkpointing"]
    )
    at_once = min(rows * shape.scored * outline.rows, max(CHUNK, outline.rows))
    chunked = rows * shape.scored * outline.rows > at_once
    logits = FLOAT * ((5 if chunked else 3) * at_once + rows * shape.kept * outline.rows)
    if options["precision"] == "bf16":
        logits += FLOAT // 2 * outline.rows * outline.hidden  # the head's weights in bfloat16
    # a speculative pass verifies one block and drafts the next
    query = options["block_size"] * (2 if options["decode_mode"] in ("speculative", "auto") else 1)
    slots, longest = options["decode_batch_size"], lengths.prompt + options["max_new_tokens"] + query
    cache = FLOAT * slots * longest * outline.cached
    decoding = cache + 2 * FLOAT * slots * query * outline.rows
    # in the backward pass of a layer: gradients of its widest activations
    workspace = 3 * FLOAT * rows * shape.tokens * max(out for _, _, out in outline.linears)
    training = kept + max(logits, workspace) + (gradients if rows < share else 0)
    return Need(
        stage=stage,
        rows=rows,
        row_tokens=shape.tokens,
        step_tokens=batch * shape.tokens,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept + workspace,
        logits=logits,
        cache=cache,
        peak=weights + max(optimizer + max(training, gradients), optimizer + decoding),
    )


def table(found: Sequence[Need], title: str) -> Table:
    """One row a stage, sizes in GiB."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for head in ("stage", "rows a pass", "tokens a row", "tokens a step"):
        made.add_column(head, justify="left" if head == "stage" else "right")
    sizes = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "peak")
    for head in sizes:
        made.add_column(f"{head} GiB", justify="right")
    for need in found:
        numbers = (need.rows, need.row_tokens, need.step_tokens)
        counts = [f"{number:,}" for number in numbers]
        made.add_row(need.stage, *counts, *(f"{getattr(need, size) / GIB:.3f}" for size in sizes))
    return made


def read(files: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """Options of a run, from YAML files and `--key=value` words, over the defaults of properties/.

    Raises:
        ValueError, FileNotFoundError: an unknown key or a value that does not fit, in one line.
    """
    options = options_of("DGR2", None)
    given: dict[str, Any] = {}
    for path in files:
        given.update(read_yaml(Path(path)))
    for word in words:
        key, equals, text = word.partition("=")
        if not key.startswith("--") or not equals:
            raise ValueError(f"command line: expected --key=value, got {word!r}")
        given[key[2:]] = parse_text(text, options.get(key[2:]))
    known = {*options, *host_keys(str(given.get("retriever", options["retriever"].default)), "")}
    for key, value in given.items():
        if key not in known:
            near = nearest(key, known)
            raise ValueError(f"{key}: no such option" + (f"; the nearest is {near!r}" if near else ""))
        problem = options[key].problem(value) if key in options else None
        if problem:
            raise ValueError(f"{key}: {problem}")
    return {key: option.default for key, option in options.items()} | given


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    own, words = _parser().parse_known_args(arguments)
    options = read(own.config_files.replace(",", " ").split(), words)
    answer = own.answer_tokens or options["max_new_tokens"]
    found = needs(options, Lengths(own.prompt_tokens, answer, own.processes, own.device == "cpu"))
    title = f"{options['backbone']}: prompts of {own.prompt_tokens} and answers of {answer} tokens, one of "
    Console(width=160).print(table(found, f"{title}{own.processes} process(es) on {own.device}"))
    if own.output:
        write_text(own.output, json.dumps([asdict(need) for need in found], indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("memory", __doc__)
    add = parser.add_argument
    add("--config_files", default="", help="YAML files of options, separated by spaces or commas")
    add("--prompt_tokens", type=int, default=512, help="longest prompt (default: 512)")
    add("--answer_tokens", type=int, default=0, help="longest answer (default: max_new_tokens)")
    add("--processes", type=int, default=1, help="processes of the launch (default: 1)")
    add("--device", choices=("cpu", "cuda"), default="cuda", help="where it is to run (default: cuda)")
    add("--output", type=Path, help="file for the same numbers, in bytes, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
