"""Semantic IDs and their index files: what is written is read, and every way a file can be wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data import semantic_id as module
from recbole_dgr2.data.semantic_id import (
    PADDING,
    SemanticIds,
    read_index,
    spelling_of,
    write_index,
)
from recbole_dgr2.data.trace_reading import IDENTIFIER

NAMES = ["[PAD]", "i7", "i2", "é 9"]
CODES = np.array([[PADDING] * 3, [4, 0, 11], [4, 0, 2], [0, 0, 11]])


def sids(codes: np.ndarray = CODES) -> SemanticIds:
    return SemanticIds(codes, spelling_of(codes.shape[1]))


def write(folder: Path, content: Any) -> Path:
    path = folder / "index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_tokens_by_hand() -> None:
    made = sids()
    assert made.tokens(1) == ("<a_4>", "<b_0>", "<c_11>")
    assert made.text(3) == "<a_0><b_0><c_11>"
    assert made.texts() == {1: "<a_4><b_0><c_11>", 2: "<a_4><b_0><c_2>", 3: "<a_0><b_0><c_11>"}
    assert made.added_tokens() == ["<a_0>", "<a_4>", "<b_0>", "<c_2>", "<c_11>"]
    assert (len(made), made.levels) == (4, 3)


def test_the_inverse() -> None:
    made = sids()
    assert [made.item_of(made.tokens(item)) for item in (1, 2, 3)] == [1, 2, 3]
    for tokens in (("<a_4>", "<b_0>"), ("<a_0>", "<b_0>", "<c_2>"), ("<a_4><b_0>", "<c_11>"), ()):
        assert made.item_of(tokens) is None


@pytest.mark.parametrize("item", [0, 4, -1])
def test_items_without_a_semantic_id(item: int) -> None:
    with pytest.raises(ValueError, match=rf"item {item}: no semantic ID, expected 1\.\.3"):
        sids().tokens(item)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[-1, -1], [3, 4], [0, 1], [3, 4]], "items 1 and 3 have the same, <a_3><b_4>"),
        ([[0, 0], [1, 1]], "PADDING in row 0 alone"),
        ([[-1, -1], [1, -1]], "expected codes >= 0"),
        ([[-1, -1]], r"n_items >= 2"),
    ],
)
def test_bad_codes(codes: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sids(np.array(codes))


def test_too_many_levels() -> None:
    with pytest.raises(ValueError, match="levels 27: expected 1 to 26"):
        spelling_of(27)


def test_the_digest_changes_with_any_code_and_any_spelling() -> None:
    changed = CODES.copy()
    changed[2, 2] = 3
    spelt = SemanticIds(CODES, (("<a_", ">"), ("<b_", ">"), ("<x_", ">")))
    assert len({sids().digest, sids(changed).digest, spelt.digest}) == 3
    assert sids().digest == sids(CODES.copy()).digest


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "index.json"
    write_index(path, sids(), NAMES)
    assert json.loads(path.read_text(encoding="utf-8"))["é 9"] == ["<a_0>", "<b_0>", "<c_11>"]
    read = read_index(path, NAMES)
    assert np.array_equal(read.codes, CODES) and read.spelling == spelling_of(3)
    assert read.digest == sids().digest


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=20, unique=True
    ).flatmap(
        lambda codes: st.tuples(
            st.just(codes),
            st.lists(st.text(min_size=1), min_size=len(codes), max_size=len(codes), unique=True),
        )
    )
)
def test_any_codes_and_any_names_survive(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[list[tuple[int, int]], list[str]]
) -> None:
    codes, names = made
    path = tmp_path_factory.mktemp("index") / "index.json"
    written = SemanticIds(np.array([(PADDING, PADDING), *codes]), spelling_of(2))
    write_index(path, written, ["[PAD]", *names])
    assert np.array_equal(read_index(path, ["[PAD]", *names]).codes, written.codes)


def test_keys_are_external_ids_in_any_order_and_others_are_left_out(tmp_path: Path) -> None:
    content = {"2": ["<a_1>"], "other": ["<a_0>", "<b_0>"], "1": ["<a_2>"]}
    read = read_index(write(tmp_path, content), ["[PAD]", "1", "2"])
    assert read.codes[1:, 0].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["<|sid_1_5|>", "<b_7>"],
            r"item 'x': token 1 is '<\|sid_1_5\|>', expected '<a_5>'; spell the tokens <a_",
        ),
        (["<a_5>", "s9:b7"], "item 'x': token 2 is 's9:b7', expected '<b_7>'"),
        (["<b_5>", "<a_7>"], "item 'x': token 1 is '<b_5>', expected '<a_5>'"),
        (["<|sid_1_05|>", "<b_7>"], r"'<\|sid_1_05\|>' is no token"),
    ],
)
def test_other_spellings_are_refused(tmp_path: Path, tokens: list[str], message: str) -> None:
    """Nothing that reads texts would know them for the name of an item."""
    with pytest.raises(ValueError, match=message):
        read_index(write(tmp_path, {"x": tokens}), ["[PAD]", "x"])


def test_what_loads_is_known_in_a_text(tmp_path: Path) -> None:
    read = read_index(write(tmp_path, {"x": ["<a_5>", "<b_0>"]}), ["[PAD]", "x"])
    assert IDENTIFIER.findall(f"<c1> {read.text(1)}") == ["<c1>", "<a_5><b_0>"]


GOOD = {"i7": ["<a_1>", "<b_1>"], "i2": ["<a_1>", "<b_2>"], "é 9": ["<a_2>", "<b_1>"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"i7": GOOD["i7"], "i2": GOOD["i2"]}, "no entry for item 'é 9', nor for 0 others of 3 items"),
        ({"0": ["<a_1>"]}, "no entry for item 'i7', nor for 2 others of 3 items; .* the file has '0'"),
        ({}, "the file has none"),
        (GOOD | {"i2": GOOD["i7"]}, "items 'i7' and 'i2' have the same tokens <a_1><b_1>"),
        (GOOD | {"i2": ["<a_3>"]}, "item 'i2' has 1 tokens, 'i7' has 2; expected equally many"),
        (GOOD | {"i2": ["<a_1>", "<c_3>"]}, "item 'i2': token 2 is '<c_3>', expected '<b_3>'"),
        (GOOD | {"i2": []}, r"item 'i2' has '\[\]'; expected a list of tokens"),
        (GOOD | {"i2": "<a_1><b_2>"}, "item 'i2' has '<a_1><b_2>'; expected a list of tokens"),
        (GOOD | {"i2": [1, 2]}, "expected a list of tokens"),
        (GOOD | {"i7": ["<a_>", "<b_1>"]}, "'<a_>' is no token; expected text around a number"),
        (GOOD | {"i7": ["<a_01>", "<b_1>"]}, "'<a_01>' is no token"),
        (GOOD | {"i7": ["7", "<b_1>"]}, "'7' is no token"),
        (GOOD | {"i7": ["<a 1>", "<b_1>"]}, "'<a 1>' is no token"),
        ([GOOD], "a JSON list, not an object; expected"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_files(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_index(path, NAMES)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"semantic IDs: no file .*none.json; expected an index file"):
        read_index(tmp_path / "none.json", NAMES)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.json"
    write_index(path, sids(), NAMES)
    before = path.read_bytes()

    def full(self: Path, *arguments: Any, **keys: Any) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(module.Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_index(path, sids(CODES[:3]), NAMES)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
