"""What reasoning traces cost, and how many of the lists got one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recbole_dgr2.data.trace_store import Acceptance, Settings


def trace_entry(phase: str, settings: Settings, counts: Acceptance) -> dict[str, Any]:
    """The entry of a phase in the report; tokens are as the source counts them."""
    names = ("lists", "accepted", "attempts", "prompt_tokens", "completion_tokens")
    return {
        "phase": phase,
        "source": settings.source,
        "model": settings.model,
        "mode": settings.mode,
        **{name: getattr(counts, name) for name in names},
    }


def trace_lines(entries: Sequence[Mapping[str, Any]]) -> str:
    """The entries of all phases in one line of words."""
    return "Reasoning traces: " + "; ".join(
        f"{entry['phase']} {entry['accepted']} of {entry['lists']} lists in {entry['attempts']} attempts of "
        f"{entry['model']} ({entry['source']}, {entry['mode']}), {entry['prompt_tokens']} tokens read, "
        f"{entry['completion_tokens']} written"
        for entry in entries
    )
