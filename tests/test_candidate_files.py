"""Candidate files of any origin: formats, ragged lists, duplicates, unknown ids, and errors that name the line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recbole_dgr2.data.candidate_files import FileLists, FileOptions, read_candidate_file
from recbole_dgr2.data.sequences import Rows
from recbole_dgr2.report.export import RankedList, falling_scores, write_lists
from tests.reranking import sequences

USERS = {"u 1": 1, "Юлия": 2, "3": 3}
ITEMS = {"a": 1, "b": 2, "c,d": 3, "e": 4, "5": 5}
DATA = sequences([1, 2, 4], [3, 1, 2], [5, 4, 1])
ROWS = Rows(np.array([1, 2, 3]), np.array([2, 2, 2]))


def read(path: Path, text: str) -> FileLists:
    path.write_text(text, encoding="utf-8")
    return read_candidate_file(path, USERS, ITEMS)


def ids(lists: FileLists, width: int = 3, mask: bool = False) -> list[list[int]]:
    return lists.candidates(ROWS, DATA, "test", FileOptions(width, mask)).ids.tolist()


FORMS = {
    "a.csv": 'user_id,item_id\nu 1,b\nu 1,"c,d"\nЮлия,e\n',
    "a.tsv": "user_id:token\titem_id:token\nu 1\tb\nu 1\tc,d\nЮлия\te\n",
    "a.jsonl": '{"user_id": "u 1", "items": ["b", "c,d"]}\n\n{"user_id": "Юлия", "items": ["e"]}\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_all_formats_say_the_same(tmp_path: Path, name: str) -> None:
    lists = read(tmp_path / name, FORMS[name])
    found = lists.candidates(ROWS, DATA, "test", FileOptions(3, False))
    assert found.ids.tolist() == [[2, 3, 0], [4, 0, 0], [0, 0, 0]]
    assert found.scores[0].tolist() == [-1.0, -2.0, -np.inf]
    assert found.counts.tolist() == [2, 1, 0]
    assert found.rank_of(np.array([3, 1, 5])).tolist() == [1, 3, 3]


def test_scores_decide_the_order_and_ties_keep_it(tmp_path: Path) -> None:
    lists = read(tmp_path / "a.csv", "user_id,score,item_id\n3,1,a\n3,2.5,b\n3,1,e\n3,-1e3,5\n")
    assert ids(lists, 4)[2] == [2, 1, 4, 5]
    assert ids(lists, 2)[2] == [2, 1]


def test_the_history_is_left_out_on_request(tmp_path: Path) -> None:
    lists = read(tmp_path / "a.csv", "user_id,item_id\nu 1,a\nu 1,e\nu 1,b\n")
    assert ids(lists)[0] == [1, 4, 2]
    assert ids(lists, mask=True)[0] == [4, 0, 0]


def test_repeated_items_count_once_at_their_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list with the target twice is the list with it once (LLMRank #11)."""
    text = "user_id,item_id,score\n3,a,1\n3,b,2\n3,a,3\nnobody,a,1\n3,nothing,1\n"
    with caplog.at_level(logging.WARNING):
        lists = read(tmp_path / "a.csv", text)
    assert ids(lists)[2] == [1, 2, 0]
    assert lists.dropped == {"repeated items": 1, "unknown users": 1, "unknown items": 1}
    for told in ("repeated items (first: {}:4: 'a')", "unknown items (first: {}:6: 'nothing')"):
        assert f"1 of {told.format(tmp_path / 'a.csv')}" in caplog.text
    assert f"1 of unknown users (first: {tmp_path / 'a.csv'}:5: 'nobody')" in caplog.text


def test_phases(tmp_path: Path) -> None:
    lists = read(tmp_path / "a.csv", "user_id,item_id,split\n3,a,train\n3,b,valid\n3,e,test\n")
    for phase, item in (("train", 1), ("valid", 2), ("test", 4)):
        found = lists.candidates(ROWS, DATA, phase, FileOptions(1, False))  # type: ignore[arg-type]
        assert found.ids[2].tolist() == [item]


def test_numbers_as_ids_in_json(tmp_path: Path) -> None:
    assert ids(read(tmp_path / "a.jsonl", '{"user_id": 3, "items": [5], "scores": [1]}'))[2] == [5, 0, 0]


BAD = [
    ("a.csv", "", "no column 'user_id' in its first line; expected .*, got an empty file"),
    ("a.csv", "user,item_id\n3,a\n", "no column 'user_id'.*got user, item_id"),
    ("a.csv", "user_id,item_id\n3,a,b\n", "a.csv:2: 3 columns, expected 2"),
    ("a.csv", "user_id,item_id,score\n3,a,1\n3,b,nan\n", "a.csv:3: score 'nan', expected a finite number"),
    ("a.csv", "user_id,item_id,score\n3,a,best\n", "a.csv:2: score 'best'"),
    (
        "a.csv",
        "user_id,item_id,split\n3,a,tset\n",
        "a.csv:2: split 'tset', expected one of train, valid, test",
    ),
    ("a.csv", "user_id,item_id\nnobody,a\n", "none of its 1 entries names a known user and item"),
    ("a.jsonl", "{", "a.jsonl:1: not a JSON object"),
    ("a.jsonl", '{"user_id": 3}', "a.jsonl:1: expected .*user_id.*items"),
    ("a.jsonl", '{"user_id": 3, "items": ["a"], "scores": [1, 2]}', "2 scores for 1 items"),
    ("a.parquet", "x", "unknown ending '.parquet', expected one of .csv"),
]


@pytest.mark.parametrize("name,text,message", BAD)
def test_errors_name_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path / name, text)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"candidate_file: no such file .*a\.csv"):
        read_candidate_file(tmp_path / "a.csv", USERS, ITEMS)


LISTS = [
    RankedList("u 1", ("c,d", "b"), (2.0, 1.5), "ok"),
    RankedList("Юлия", ("e",), (), "repaired", "duplicate, omission"),
    RankedList('no"body', (), (), "missing", "unknown user"),
    RankedList("3", ("5",), (1.0,), "fallback", "unparsed"),
]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_an_export_can_be_read_back(tmp_path: Path, name: str) -> None:
    write_lists(LISTS, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    lists = read_candidate_file(tmp_path / name, USERS, ITEMS)
    assert ids(lists) == [[3, 2, 0], [4, 0, 0], [5, 0, 0]]


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=12))
def test_exported_scores_fall_in_steps_that_a_file_keeps(values: list[float]) -> None:
    scores = falling_scores(values)
    assert (np.diff(np.array(scores, dtype=np.float32)) < 0).all()
    assert np.allclose(scores, sorted(values, reverse=True), rtol=1e-5, atol=1e-30)
    if len(set(values)) == len(values):
        assert list(scores) == sorted(values, reverse=True)


@pytest.mark.parametrize("scores", [(1.0, 2.0), (1.0, 1.0), (1.0,)], ids=str)
def test_a_list_whose_scores_say_another_order_is_refused(scores: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="user u: expected falling scores, one an item"):
        RankedList("u", ("a", "b"), scores, "ok")


def test_an_export_says_why(tmp_path: Path) -> None:
    write_lists(LISTS, tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "user_id,rank,item_id,score,status,reason"
    assert lines[1] == 'u 1,1,"c,d",2.0,ok,'
    assert lines[3] == 'Юлия,1,e,,repaired,"duplicate, omission"'
    assert lines[4] == '"no""body",,,,missing,unknown user'
    write_lists(LISTS, tmp_path / "a.jsonl")
    entries = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [entry["status"] for entry in entries] == ["ok", "repaired", "missing", "fallback"]
    with pytest.raises(ValueError, match=r"unknown ending, expected \.csv or \.jsonl"):
        write_lists(LISTS, tmp_path / "a.txt")
