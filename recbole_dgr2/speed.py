"""Speed of the decoders against one another, on a trained model and its own prompts.

python -m recbole_dgr2.speed --stage=saved/ml-100k-ItemKNN-2020/conversion --prompts=prompts.jsonl --output=speed

All decoders run in turn in one process on the same requests; every speed stands beside the quality of the same
outputs. The prompts file is described in
`recbole_dgr2.work`. Written: <output>/speed.json, speed.md, PNG plots, and trace.html, one
decode of each mode pass by pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch

from recbole_dgr2.cache import write_text
from recbole_dgr2.data.ranking import Ranking, parse_ranking
from recbole_dgr2.decode import DecodeOptions, Request, decode
from recbole_dgr2.decode.auto import measure_pass_costs
from recbole_dgr2.decode.outside import generate
from recbole_dgr2.model.backbone import Backbone, hide_progress_bars
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import load_stage, require_block_diffusion
from recbole_dgr2.model.forward import compile_passes
from recbole_dgr2.report.benchmark_page import markdown
from recbole_dgr2.report.plots import plot_frontier, plot_speedups
from recbole_dgr2.report.speed import (
    cost_cells,
    curves_of,
    implied_cells,
    points_of,
    quality_entry,
    speed_cells,
    speed_entry,
)
from recbole_dgr2.report.throughput import measure
from recbole_dgr2.report.trace_view import View, print_view, view_of, write_html
from recbole_dgr2.run import library_versions
from recbole_dgr2.threads import choose_threads
from recbole_dgr2.work import Work, read_prompts

AR: Final = "autoregressive"
logger = logging.getLogger(__name__)


class Bench:
    """One model and how it is timed."""

    def __init__(
        self, folder: Path, rounds: int, max_new_tokens: int, seed: int, compiled: bool = False
    ) -> None:
        self.backbone, info = load_stage(folder)
        if compiled:
            compile_passes(self.backbone.model)
        self.spec: BlockDiffusionSpec = require_block_diffusion(info, folder)
        self.rounds, self.seed = rounds, seed
        self.base = DecodeOptions(AR, max_new_tokens, 1, seed=seed)

    def decoders(
        self, names: Sequence[str], base: DecodeOptions
    ) -> dict[str, Callable[[Sequence[Request]], Any]]:
        """Decoders by name: a mode, "block 0.9" (tau), "block 0.9/16" (and block length), "speculative 16"."""
        return {name: self._decoder(name, base) for name in names}

    def _decoder(self, name: str, base: DecodeOptions) -> Callable[[Sequence[Request]], Any]:
        model, eos_id = self.backbone.model, self.backbone.eos_id
        if name == "generate":
            return lambda requests: generate(model, requests, base, eos_id, self.spec.mask_id)
        mode, _, rest = name.partition(" ")
        options = replace(base, mode=mode)  # type: ignore[arg-type]
        if mode == "block" and rest:
            tau, _, length = rest.partition("/")
            options = replace(options, tau=float(tau), block_size=int(length) if length else None)
        elif rest:
            options = replace(options, block_size=int(rest))
        return lambda requests: decode(model, requests, options, eos_id=eos_id, spec=self.spec)

    def entries(
        self, names: Sequence[str], work: Work, base: DecodeOptions, **setting: Any
    ) -> list[dict[str, Any]]:
        """Speed and quality of each named decoder on the work."""
        logger.info("%s: %s, %d requests", setting or "modes", ", ".join(names), len(work.requests))
        speeds = measure(self.decoders(names, base), work.requests, baseline=AR, rounds=self.rounds)
        wanted = [completion.token_ids for completion in speeds[AR].outcome.completions]
        entries = []
        for name, speed in speeds.items():
            outputs = [completion.token_ids for completion in speed.outcome.completions]
            quality = quality_entry(
                outputs, wanted, self._rankings(speed.outcome.completions, work), work.targets, self.seed
            )
            reason = getattr(speed.outcome, "reason", "")
            fixed = {"decoder": name, "batch": base.batch_size, "reason": reason}
            fixed["queries"] = _queries(speed.outcome.completions)
            entries.append({**fixed, **setting, **speed_entry(speed), **quality})
        return entries

    def _rankings(self, completions: Sequence[Any], work: Work) -> list[Ranking]:
        if None in work.candidates:
            return []
        return [
            parse_ranking(self.text(completion.token_ids), n or 0, completion.finished)
            for completion, n in zip(completions, work.candidates, strict=True)
        ]

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, the end token left out."""
        backbone: Backbone = self.backbone
        return str(backbone.tokenizer.decode([token for token in token_ids if token != backbone.eos_id]))

    def views(self, request: Request, names: Sequence[str]) -> list[View]:
        """One request decoded by each named decoder, for the eye."""
        found = []
        for name, decoder in self.decoders(names, self.base).items():
            (answer,) = decoder([request]).completions
            title = f"{name}: {len(answer.token_ids)} tokens in {answer.passes} passes"
            found.append(view_of(answer.trace, len(answer.token_ids), self._word, title))
        return found

    def _word(self, token: int) -> str:
        return str(self.backbone.tokenizer.decode([token]))


def run(bench: Bench, work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """All sweeps; plain values."""
    few = work.first(options.requests)
    taus = [f"block {tau:g}" for tau in options.taus]
    lengths = [f"speculative {length}" for length in options.blocks if length <= bench.spec.block_size]
    shorter = [f"block 0.9/{length}" for length in options.blocks if length < bench.spec.block_size]
    outside = [] if options.no_generate else ["generate"]
    names = [AR, *outside, *taus, *shorter, "speculative", *lengths, "auto"]
    chosen = [AR, "block 0.9", "speculative", "auto"]
    tables = {"modes": bench.entries(names, few, bench.base)}
    tables["batch"], costs = [], []
    for batch in options.batches:
        base = replace(bench.base, batch_size=batch)
        tables["batch"] += bench.entries(
            [AR, *outside, *chosen[1:]], work.first(max(4 * batch, options.requests)), base
        )
        longest = max(len(request.prompt_ids) for request in few.requests)
        costs.append(asdict(measure_pass_costs(bench.backbone.model, batch, longest)))
    tables["output"] = []
    for length in options.outputs:
        cut = replace(bench.base, max_new_tokens=length)
        tables["output"] += bench.entries(chosen[:3], few, cut, output=length)
    contexts = [_implied(bench, length, tables["modes"]) for length in options.inputs]
    return {"tables": tables, "costs": costs, "inputs": contexts}


def _implied(bench: Bench, length: int, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed-ups that the passes of the real prompts would give after `length` tokens: each pass at its measured cost.

    A small model has seen no long prompt, so text made up to such a length would tell nothing of its decoders.
    """
    costs = measure_pass_costs(bench.backbone.model, 1, length)
    seconds = {
        entry["decoder"]: sum(count * costs.of(int(q)) for q, count in entry["queries"].items())
        / entry["tokens"]
        for entry in entries
        if entry["queries"]
    }
    return {
        "input": length,
        "speedup": {name: seconds[AR] / own for name, own in seconds.items()},
        **asdict(costs),
    }


def write(result: dict[str, Any], views: Sequence[View], folder: Path) -> str:
    """JSON, page and plots into the folder; gives the page's text."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "speed.json", json.dumps(result, indent=2) + "\n")
    write_html(views, folder / "trace.html")
    lines = [
        f"Command: `{result['command']}`",
        "",
        "Speed-ups are over autoregressive decoding of the same weights, ",
    ]
    lines[-1] += (
        f"medians of {result['rounds']} interleaved rounds, prefill apart; {result['threads']} threads."
    )
    for name, entries in result["tables"].items():
        setting = "batch" if name == "modes" else name
        if entries:
            lines += ["", f"## {name}", "", *markdown(speed_cells(entries, setting))]
            lines += ["", *dict.fromkeys(f"auto: {entry['reason']}" for entry in entries if entry["reason"])]
        if name != "modes" and curves_of(entries, setting):
            plot_speedups(curves_of(entries, setting), setting, folder / f"speedup_{name}.png")
    for title, cells in (
        ("pass costs", cost_cells(result["costs"])),
        ("input", implied_cells(result["inputs"])),
    ):
        lines += ["", f"## {title}", "", *markdown(cells)]
    points = points_of(result["tables"]["modes"], "recall@1")
    if points:
        plot_frontier(points, "recall@1 over hits", folder / "frontier.png")
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    text = "\n".join([*lines, "", f"Versions: {versions}"]) + "\n"
    write_text(folder / "speed.md", text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 on success, 2 when the user has to change something."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    hide_progress_bars()
    torch.set_num_threads(options.threads or choose_threads())
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("the plots need matplotlib, which is not installed: pip install matplotlib")
        work = read_prompts(options.prompts)
        bench = Bench(options.stage, options.rounds, options.max_new_tokens, options.seed, options.compile)
        result = run(bench, work, options)
        views = bench.views(work.requests[0], [AR, "block 0.9", "speculative"])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = " ".join(["python -m recbole_dgr2.speed", *(sys.argv[1:] if arguments is None else arguments)])
    shared = {"rounds": options.rounds, "threads": torch.get_num_threads(), "versions": library_versions()}
    print(write({"command": command, **shared, **result}, views, options.output))
    for view in views[1:]:
        print_view(view)
    return 0


def _queries(completions: Sequence[Any]) -> dict[int, int]:
    """Number of passes by the tokens a row fed into them; empty where the trace does not say."""
    counts: Counter[int] = Counter()
    for completion in completions:
        if completion.speculation is not None:
            counts.update(completion.speculation.queries)
        elif completion.trace.passes:
            counts[completion.trace.block_size] += completion.passes
    return dict(counts)


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def numbers(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recbole_dgr2.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--stage", type=Path, required=True, help="folder of a finished conversion stage")
    add(
        "--prompts",
        type=Path,
        required=True,
        help='JSON lines such as {"key": 17, "prompt_ids": [5, 9], "candidates": 10, "target": 3}',
    )
    add("--output", type=Path, required=True, help="folder for speed.json, speed.md, plots and trace.html")
    add("--requests", type=int, default=40, help="prompts timed at batch 1 (default: 40)")
    add("--rounds", type=int, default=3, help="times each decoder goes through its prompts (default: 3)")
    add("--max_new_tokens", type=int, default=192, help="longest answer, tokens (default: 192)")
    add("--taus", type=_numbers(float), default=[0.4, 0.6, 0.9, 0.99], help="thresholds, comma-separated")
    add("--blocks", type=_numbers(int), default=[8, 16, 32], help="block and draft lengths, comma-separated")
    add("--batches", type=_numbers(int), default=[1, 4, 16, 64], help="batch sizes, comma-separated")
    add("--outputs", type=_numbers(int), default=[16, 32, 64, 128], help="output lengths, comma-separated")
    add(
        "--inputs",
        type=_numbers(int),
        default=[32, 128, 512, 2048, 4096],
        help="input lengths, comma-separated",
    )
    add("--threads", type=int, default=0, help="torch threads, 0: measured (default: 0)")
    add("--seed", type=int, default=0, help="of intervals (default: 0)")
    add(
        "--compile",
        action="store_true",
        help="compile the forward pass (minutes at first), for all decoders alike",
    )
    add("--no_generate", action="store_true", help="leave out Hugging Face generate, the outside reference")
    return parser


if __name__ == "__main__":
    sys.exit(main())
