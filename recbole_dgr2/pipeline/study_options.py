"""Options that the runs of a study were made with: what they share, and in what a variant differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recbole_dgr2.pipeline.stage_order import option_prefixes_without
from recbole_dgr2.pipeline.study_members import OWN_OPTIONS

Options = Mapping[str, Any]


def common_options(options: Sequence[Options]) -> dict[str, Any]:
    """Options of several runs as one: a value that they share, else the list of their values, run by run."""
    found = {}
    for key in sorted({key for one in options for key in one}):
        values = [one.get(key) for one in options]
        found[key] = values[0] if all(value == values[0] for value in values) else values
    return found


def differing_options(pairs: Sequence[tuple[Options, Options]]) -> dict[str, Any]:
    """Options in which a variant's runs differ from the runs of the same seeds; places and the machine do not count.

    Args:
        pairs: all options of a variant's run, and of the run of its seed. Those of stages that either run was not asked
            for last are not compared: it was not they that made it.
    """
    ignored = {*OWN_OPTIONS} - {"stages"}
    found = []
    for own, other in pairs:
        asked = set(own.get("stages", ())) & set(other.get("stages", ()))
        later = option_prefixes_without(asked)
        keys = {key for key in {*own, *other} - ignored if not key.startswith(later)}
        found.append({key: own.get(key) for key in keys if own.get(key) != other.get(key)})
    return common_options(found)
