"""Rules that tie options to one another, checked when a Config is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbole_dgr2.schema import Option


def check_together(options: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    """Refuse options that are each fine but do not go together.

    Args:
        options: every option of a run.
        known: what there is to know of the plugin's own.

    Raises:
        ValueError: one line that names the keys.
    """
    _check_evaluation(options, known["eval_args"].default)
    if options.get("benchmark_filename"):
        raise ValueError(
            "benchmark_filename: lists are cut from whole sequences, leave-one-out; leave it out and put all parts "
            f"into one {options['dataset']}.inter"
        )
    if options["mid_training_epochs"] and options["semantic_ids"] is None:
        raise ValueError(
            "mid_training_epochs: mid-training teaches semantic IDs; set semantic_ids, e.g. to kmeans"
        )
    if options["decode_mode"] != "block" and options["context"] == "block":
        raise ValueError(
            f"decode_mode: {options['decode_mode']} answers by the causal stream, which context: block does not train; "
            "expected decode_mode: block, or context: causal"
        )
    ordered = [stage for stage in known["stages"].words() if stage in options["stages"]]
    if list(options["stages"]) != ordered:
        raise ValueError(f"stages: expected each once and in run order, {ordered}, got {options['stages']}")
    if options["lora_targets"] == []:
        raise ValueError(
            "lora_targets: an empty list adapts nothing; expected names of layers, or null for all"
        )
    heads, kv_heads = options["embedded_num_heads"], options["embedded_num_kv_heads"]
    if options["embedded_hidden_size"] % heads:
        raise ValueError(f"embedded_hidden_size: expected a multiple of embedded_num_heads ({heads})")
    if heads % kv_heads:
        raise ValueError(f"embedded_num_kv_heads: expected a divisor of embedded_num_heads ({heads})")


def _check_evaluation(options: Mapping[str, Any], whole: Any) -> None:
    protocol = {key: options["eval_args"][key] for key in ("split", "order", "mode")}
    expected = {
        "split": {"LS": "valid_and_test"},
        "order": "TO",
        "mode": {"valid": "full", "test": "full"},
    }
    if protocol != expected:
        raise ValueError(
            f"eval_args: the re-ranker ranks leave-one-out lists, expected {whole}, got {protocol}"
        )
    cutoff = str(options["valid_metric"]).partition("@")[2]
    if cutoff not in {str(k) for k in options["topk"]}:
        raise ValueError(f"valid_metric: its cut-off {cutoff!r} must be one of topk {options['topk']}")
