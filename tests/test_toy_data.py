"""The generated toy data set: reproducible to the byte, and following its rule."""

from __future__ import annotations

from pathlib import Path

from tests.make_toy import item_token, write_toy
from tests.toy_run import ROOT


def test_toy_data_is_reproducible(tmp_path: Path) -> None:
    write_toy(tmp_path)
    for name in ("toy.inter", "toy.item"):
        assert (tmp_path / name).read_bytes() == (ROOT / "dataset" / "toy" / name).read_bytes()


def test_toy_data_follows_its_rule() -> None:
    histories: dict[str, list[str]] = {}
    for line in (ROOT / "dataset" / "toy" / "toy.inter").read_text().splitlines()[1:]:
        user, item, _ = line.split("\t")
        histories.setdefault(user, []).append(item)
    successor = {item_token(c, p): item_token(c, (p + 1) % 10) for c in range(8) for p in range(10)}
    assert len(histories) == 60
    for items in histories.values():
        assert len(items) >= 8
        assert len(set(items)) == len(items)
        assert [successor[item] for item in items[-4:-1]] == items[-3:]
