"""How many prompts had to lose something to fit their budget, and what they lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recbole_dgr2.data.prompt import Prompt


def count_trimmed(phase: str, prompts: Iterable[Prompt]) -> dict[str, Any]:
    """The entry of a phase in the report: prompts, those that were trimmed, and what was left out of them in all.

    history_items: items dropped, the oldest of their lists. candidate_titles: titles cut.
    """
    kept = list(prompts)
    return {
        "phase": phase,
        "prompts": len(kept),
        "trimmed": sum(bool(prompt.dropped_history or prompt.cut_candidates) for prompt in kept),
        "history_items": sum(prompt.dropped_history for prompt in kept),
        "candidate_titles": sum(prompt.cut_candidates for prompt in kept),
    }


def trimmed_line(entries: Sequence[Mapping[str, Any]]) -> str:
    """The entries of all phases in one line of words."""
    return "Prompts trimmed to their budget: " + "; ".join(
        f"{entry['phase']} {entry['trimmed']} of {entry['prompts']}"
        + (
            f" ({entry['history_items']} history items dropped, {entry['candidate_titles']} candidate titles cut)"
            if entry["trimmed"]
            else ""
        )
        for entry in entries
    )
