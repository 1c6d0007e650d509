"""Which architectures of transformers work as a backbone: tiny random models of each, and what is verified on them.

python -m tests.families --output=results/backbones.json      writes the JSON and, beside it, the page (.md)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from recbole_dgr2.decode import Completion, DecodeOptions, Request, decode
from recbole_dgr2.export import export
from recbole_dgr2.model.adapters import Adapted, AdapterOptions, Base, adapt, adapter_off, merge
from recbole_dgr2.model.backbone import (
    Backbone,
    hide_progress_bars,
    load_backbone,
    start_mask_row,
    train_tokenizer,
)
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, load_stage, save_stage
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.model.replay import replay_all, replayed_logits
from recbole_dgr2.pipeline.run import library_versions
from recbole_dgr2.report.benchmark_page import markdown
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.trainer import convert
from recbole_dgr2.trainer.rollouts import trajectory_of
from tests.tiny import CORPUS, LABELS, random_tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8}
PROMPTS = [Request(i, tuple(row)) for i, row in enumerate(random_tokens([9, 5, 12], high=300))]
BLOCK, NEW = 4, 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Family:
    """An architecture: its name in transformers, models of it, what its config adds, and why it is refused, if so."""

    name: str
    models: str
    config: dict[str, Any]
    refused: str = ""


FAMILIES = {
    "qwen3": Family("qwen3", "Qwen3", {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3, untied": Family(
        "qwen3", "Qwen3 (8B and larger)", {**GROUPED, "head_dim": 8, "tie_word_embeddings": False}
    ),
    "qwen2": Family("qwen2", "Qwen2, Qwen2.5", {**GROUPED, "tie_word_embeddings": True}),
    "llama": Family("llama", "Llama 2 and 3, SmolLM2, TinyLlama", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": Family("mistral", "Mistral v0.2 and later", {**GROUPED, "sliding_window": None}),
    "smollm3": Family("smollm3", "SmolLM3", GROUPED),
    "gemma": Family("gemma", "Gemma 1", GEMMA),
    "phi": Family("phi", "Phi-1, Phi-2", {"num_key_value_heads": 4}),
    "phi3": Family("phi3", "Phi-3, Phi-4", {**GROUPED, "sliding_window": None}),
    "olmo": Family("olmo", "OLMo", GROUPED),
    "olmo2": Family("olmo2", "OLMo 2", GROUPED),
    "gpt_neox": Family("gpt_neox", "Pythia", {}),
    "mistral, window": Family("mistral", "Mistral v0.1", {**GROUPED, "sliding_window": 16}, "sliding window"),
    "gemma2": Family("gemma2", "Gemma 2", {**GEMMA, "sliding_window": 16}, "sliding window"),
    "gemma3_text": Family("gemma3_text", "Gemma 3", {**GEMMA, "sliding_window": 16}, "sliding window"),
    "granite": Family("granite", "Granite 3", {**GROUPED, "logits_scaling": 4.0}, "not just the head"),
    "mamba": Family("mamba", "Mamba", {}, "linear_attention"),
    "t5": Family("t5", "T5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}, "encoder-decoder"),
}


def pretrained(family: Family, folder: Path) -> Path:
    """A folder of a random model of that family, with a tokenizer of 300 ids that knows no label."""
    kept = (
        SHAPE
        if family.name != "t5"
        else {"vocab_size": 320, "pad_token_id": 0, "eos_token_id": 1, "num_heads": 4}
    )
    config = AutoConfig.for_model(family.name, **{**kept, **family.config})
    kind = AutoModelForSeq2SeqLM if family.name == "t5" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder)
    train_tokenizer(CORPUS, 300, ()).save_pretrained(folder)
    return folder


class Examined:
    """One family, from a pretrained folder to an export; each check raises AssertionError where it fails."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.folder, self.source = folder, pretrained(family, folder / "pretrained")
        plain, self.spec = convert(load_backbone(self.source, LABELS), BLOCK)
        start_mask_row(plain, self.spec.mask_id)
        self.backbone: Backbone = plain
        self.ids = torch.tensor([[*PROMPTS[0].prompt_ids, *range(300, 310), self.spec.mask_id]])

    def decoded(self, backbone: Backbone, mode: Any, spec: BlockDiffusionSpec | None) -> Sequence[Completion]:
        """Greedy completions of the three prompts, together."""
        options = DecodeOptions(mode, NEW, 3, tau=0.05)
        return decode(backbone.model, PROMPTS, options, eos_id=backbone.eos_id, spec=spec).completions

    @torch.no_grad()
    def logits(self, backbone: Backbone) -> torch.Tensor:
        """Of one prompt with all labels and the mask token."""
        return backbone.model(self.ids).logits

    @torch.no_grad()
    def blocks(self) -> None:
        """Cached decoding in blocks = one full forward of prompt, answer and canvases."""
        done = self.decoded(self.backbone, "block", self.spec)
        played = [trajectory_of(p.key, p.prompt_ids, one) for p, one in zip(PROMPTS, done, strict=True)]
        replay = replay_all(played, self.spec, self.backbone.pad_id)
        scores = replayed_logits(TokenScorer(self.backbone.model), replay, self.spec.mask_id).log_softmax(-1)
        found = scores.gather(1, replay.targets[:, None])[:, 0].tolist()
        places = zip(replay.rows.tolist(), replay.slots.tolist(), found, strict=True)
        gap = max(abs(played[row].log_probs[slot] - value) for row, slot, value in places)
        assert gap < TOLERANCE, f"log-probabilities differ by {gap:.2g}"

    def speculative(self) -> None:
        """Speculative decoding = autoregressive decoding, token for token."""
        pair = [self.decoded(self.backbone, mode, self.spec) for mode in ("speculative", "autoregressive")]
        assert [c.token_ids for c in pair[0]] == [c.token_ids for c in pair[1]], "other tokens"
        assert sum(len(c.token_ids) for c in pair[0]) > NEW, "answers too short to show anything"

    def adapters(self) -> None:
        """A fresh adapter changes nothing, off is the base, merged is on; the trained rows are among them."""
        base, before = Base.of(self.source, self.backbone), self.logits(self.backbone)
        ids = [*self.backbone.tokenizer.convert_tokens_to_ids(list(LABELS)), self.spec.mask_id]
        student = adapt(self.backbone, AdapterOptions(2, 4.0), base, ids, seed=0)
        self.backbone = student
        assert (self.logits(student) - before).abs().max() < TOLERANCE, "a fresh adapter changes the logits"
        random = torch.Generator().manual_seed(1)
        for parameter in student.model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=random)
        on = self.logits(student)
        assert (on - before).abs().max() > 0.01, "the adapter does nothing"
        with adapter_off(student.model):
            assert torch.equal(self.logits(student), before), "off is not the base"

    def saving(self) -> None:
        """Adapter and base read back and merged = in memory."""
        run = self.folder / "run"
        save_stage(run / "conversion", self.backbone, StageInfo("conversion", None, self.spec))
        loaded, _ = load_stage(run / "conversion")
        gap = float((self.logits(loaded) - self.logits(self.backbone)).abs().max())
        assert isinstance(self.backbone, Adapted) and gap < 10 * TOLERANCE, f"logits differ by {gap:.2g}"

    def exporting(self) -> None:
        """generate() of plain transformers on the export = autoregressive decoding here."""
        out = export(self.folder / "run", "conversion", self.folder / "out")
        model = AutoModelForCausalLM.from_pretrained(out)
        expected = self.decoded(merge(self.backbone), "autoregressive", self.spec)
        for request, wanted in zip(PROMPTS, expected, strict=True):
            ids = torch.tensor([request.prompt_ids])
            found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
            assert tuple(found[0, ids.shape[1] :].tolist()) == wanted.token_ids, "other tokens"


CHECKS: dict[str, Callable[[Examined], None]] = {
    "blocks = full forward": Examined.blocks,
    "speculative = AR": Examined.speculative,
    "adapter": Examined.adapters,
    "save and load": Examined.saving,
    "export": Examined.exporting,
}


def examine(family: Family, folder: Path) -> dict[str, str]:
    """ "yes" or what is wrong, by check; for a family that is refused, the reason under "refused"."""
    try:
        examined = Examined(family, folder)
    except ValueError as error:
        return {
            "refused": str(error).split("cannot be loaded: ")[-1].split(" (expected a")[0].split("': ")[-1]
        }
    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check(examined)
            found[name] = "yes"
        except (AssertionError, ValueError) as error:
            found[name] = f"no: {error}"
    return found


def page(content: dict[str, Any]) -> str:
    """The page of a measurement, from the content of its JSON file."""
    works = [["transformers", "models", *CHECKS]]
    refused = [["transformers", "models", "reason"]]
    for name, entry in content["families"].items():
        found = entry["found"]
        row = [name, entry["models"]]
        if "refused" in found:
            refused.append([*row, found["refused"]])
        else:
            works.append([*row, *(found[check] for check in CHECKS)])
    meanings = [f"- {name}: {check.__doc__}" for name, check in CHECKS.items()]
    versions = ", ".join(f"{name} {value}" for name, value in content["versions"].items())
    lines = [
        "# Backbones",
        "",
        "Tiny random models of each architecture, float32, CPU; new labels and a mask token.",
    ]
    lines += [
        "",
        *markdown(works),
        "",
        *meanings,
        "",
        "Refused when the model is loaded:",
        "",
        *markdown(refused),
    ]
    return "\n".join([*lines, "", "```", content["command"], "```", "", f"Versions: {versions}"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--output", type=Path, required=True, help="the JSON file; the page lies beside it as .md"
    )
    known = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hide_progress_bars()
    families: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            families[name] = {"models": family.models, "found": examine(family, Path(folder))}
        sys.stdout.write(f"{name}: {families[name]['found']}\n")
    command = f"python -m tests.families --output={known.output}"
    content = {"command": command, "families": families, "versions": library_versions()}
    write_text(known.output, json.dumps(content, indent=1) + "\n")
    write_text(known.output.with_suffix(".md"), page(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
