"""The file of written traces: it only grows, a torn last line is dropped, anything else that is wrong is named."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.acceptance import main
from recbole_dgr2.data.trace_store import Attempt, Settings, TraceStore, acceptance

SETTINGS = Settings("openai", "writer", "rejection", 1.0, 7, 512, "form")
KEPT = Attempt(
    key=3,
    user="u1",
    items=("i9", "i4"),
    **vars(SETTINGS),
    attempt=0,
    prompt="abc",
    prompt_tokens=11,
    completion_tokens=5,
    fault="",
    reasoning='<think> "quoted" \u2028 café\n',
    answer='{"recommendations":["<c1>","<c2>"]}',
)
DROPPED = replace(KEPT, key=4, fault="target not first", reasoning="", answer="")


def stored(path: Path, *attempts: Attempt) -> TraceStore:
    store = TraceStore(path)
    for attempt in attempts:
        store.append(attempt)
    return store


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "below" / "traces.jsonl"
    store = stored(path, KEPT, DROPPED)
    again = TraceStore(path)
    assert again.attempts == store.attempts == [KEPT, DROPPED]
    assert again.find(3, "abc", SETTINGS) == [KEPT]
    assert again.attempts[0].trace.text == KEPT.reasoning + KEPT.answer
    assert len(path.read_bytes().split(b"\n")) == 3
    assert set(json.loads(path.read_bytes().split(b"\n")[1])) >= {"user", "items", "accepted"}


def test_an_attempt_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    stored(path, KEPT, replace(KEPT, reasoning="another"), DROPPED)
    stored(path, KEPT)
    assert TraceStore(path).attempts == [KEPT, DROPPED]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    "change",
    [
        {"key": 5},
        {"prompt": "abd"},
        {"attempt": 1},
        {"model": "m"},
        {"mode": "targeted"},
        {"temperature": 0.5},
        {"seed": 8},
        {"source": "hf"},
        {"max_tokens": 256},
        {"form": "another"},
    ],
)
def test_other_lists_prompts_and_settings_are_other_attempts(tmp_path: Path, change: dict[str, Any]) -> None:
    other = replace(KEPT, **change)
    store = stored(tmp_path / "traces.jsonl", KEPT, other)
    assert TraceStore(store.path).attempts == [KEPT, other]
    assert store.find(3, "abc", SETTINGS) == ([KEPT, other] if change == {"attempt": 1} else [KEPT])


@settings(max_examples=30)
@given(st.integers(1, 400))
def test_a_run_killed_in_mid_line_goes_on_as_if_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    whole, torn = (tmp_path_factory.mktemp("store") / "traces.jsonl" for _ in range(2))
    attempts = [KEPT, DROPPED, replace(KEPT, key=5)]
    stored(whole, *attempts)
    torn.write_bytes(whole.read_bytes()[:-cut])
    survived = TraceStore(torn).attempts
    assert survived == attempts[: len(survived)]
    stored(torn, *attempts)
    assert torn.read_bytes() == whole.read_bytes()


def test_two_runs_at_a_torn_file_lose_nothing(tmp_path: Path) -> None:
    """Both saw the torn line; the second to write must not cut off what the first has written since."""
    path = tmp_path / "traces.jsonl"
    stored(path, KEPT, DROPPED)
    path.write_bytes(path.read_bytes()[:-9])
    first, second = TraceStore(path), TraceStore(path)
    others = [replace(KEPT, key=key) for key in (5, 6, 7)]
    for store, attempt in zip((first, second, first), others, strict=True):
        store.append(attempt)
    assert TraceStore(path).attempts == [KEPT, *others]


def test_what_another_run_leaves_half_written_is_not_written_on(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    store = stored(path, KEPT)
    with path.open("ab") as file:
        file.write(b'{"key": 4')
    store.append(DROPPED)
    lines = path.read_bytes().split(b"\n")
    assert lines[1] == b'{"key": 4' and json.loads(lines[2])["key"] == DROPPED.key and lines[3:] == [b""]


def test_a_torn_line_is_dropped_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traces.jsonl"
    stored(path, KEPT)
    content = path.read_bytes()
    path.write_bytes(content + content[:-1])  # even a line that would parse: its end never came
    with caplog.at_level(logging.WARNING):
        assert TraceStore(path).attempts == [KEPT]
    assert f"{path}, line 2: half-written" in caplog.text
    assert path.read_bytes() == content + content[:-1], "reading alone changes nothing"


def line(**changes: Any) -> str:
    path = {**vars(KEPT), "items": list(KEPT.items), "accepted": True, **changes}
    return json.dumps({name: value for name, value in path.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{not json", "line 1"),
        ("[]", "expected an object"),
        ("", "line 1"),
        (line(key=...), "'key' is missing"),
        (line(colour=1), "'colour' is unknown"),
        (line(key="3"), "key is '3', expected int"),
        (line(attempt=True), "attempt is True"),
        (line(items="i9"), "items is 'i9'"),
        (line(accepted=False), "accepted is False"),
        (line(answer=""), "answer ''"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not an attempt at a trace") as caught:
        TraceStore(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_acceptance_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """List 1 at once, list 2 at its third attempt, list 3 never in three."""
    failed = replace(DROPPED, fault="unparsed")
    attempts = [
        replace(KEPT, key=1),
        replace(DROPPED, key=2),
        replace(failed, key=2, attempt=1),
        replace(KEPT, key=2, attempt=2),
        *(replace(DROPPED, key=3, attempt=number) for number in range(3)),
    ]
    counts = acceptance(attempts)
    assert (counts.lists, counts.accepted, counts.attempts) == (3, 2, 7)
    assert counts.by_attempt == (1, 1, 2)
    assert [counts.within(budget) for budget in (0, 1, 2, 3, 9)] == [0, 1 / 3, 1 / 3, 2 / 3, 2 / 3]
    assert counts.faults == {"target not first": 4, "unparsed": 1}
    assert (counts.prompt_tokens, counts.completion_tokens) == (77, 35)
    store = stored(tmp_path / "traces.jsonl", *attempts)
    assert main([str(store.path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "2 of 3 lists have a trace after 7 attempts (accepted within 1: 0.333, 2: 0.333, 3: 0.667)" in shown
    )
    assert "target not first 4, unparsed 1; tokens: 77 read, 35 written" in shown


def test_no_attempts_have_no_rate() -> None:
    assert (acceptance([]).rate, acceptance([]).within(4)) == (0.0, 0.0)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err
