"""Architectures that work as a backbone work in every respect; those that cannot are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.families import CHECKS, FAMILIES, examine, page

# one with the head apart from the embedding, one whose head has a bias
QUICK = ("qwen3, untied", "phi", *(name for name, family in FAMILIES.items() if family.refused))
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK]
RESULTS = Path(__file__).resolve().parent.parent / "results"


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_family(name: str, tmp_path: Path) -> None:
    family, found = FAMILIES[name], examine(FAMILIES[name], tmp_path)
    if family.refused:
        assert list(found) == ["refused"] and family.refused in found["refused"]
    else:
        assert found == dict.fromkeys(CHECKS, "yes")


def test_the_page_is_that_of_the_results() -> None:
    content = json.loads((RESULTS / "backbones.json").read_text(encoding="utf-8"))
    assert set(content["families"]) == set(FAMILIES)
    assert (RESULTS / "backbones.md").read_text(encoding="utf-8") == page(content)


def test_the_page_shows_what_failed() -> None:
    found = dict.fromkeys(CHECKS, "yes") | {"export": "no: other tokens"}
    families = {
        "own": {"models": "Own", "found": found},
        "mamba": {"models": "Mamba", "found": {"refused": "it has no attention"}},
    }
    text = page({"families": families, "versions": {"torch": "2"}, "command": "python"})
    assert "| own" in text and "no: other tokens" in text and "it has no attention" in text
