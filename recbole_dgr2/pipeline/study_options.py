"""Options that the runs of a study were made with: what they share, and in what a variant differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recbole_dgr2.pipeline.study_members import OWN_OPTIONS

DEFAULT = "default"
"""Stands for the value of an option that a run left as it is."""


def common_options(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Options of several runs as one: a value that they share, else the list of their values, run by run."""
    found = {}
    for key in sorted({key for one in options for key in one}):
        values = [one.get(key) for one in options]
        found[key] = values[0] if all(value == values[0] for value in values) else values
    return found


def differing_options(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a variant's runs set otherwise than the runs it is set beside; seeds and folders do not count."""
    keys = sorted({*shared, *own} - {*OWN_OPTIONS})
    found = {key: own.get(key, DEFAULT) for key in keys}
    return {key: value for key, value in found.items() if value != shared.get(key, DEFAULT)}
