"""Servers that write traces: they answer, refuse, babble, hang up or say nothing, and never see a key leak."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.data.rejection import Draft, Mode, Problem, collect_lessons
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_reading import UNFINISHED
from recbole_dgr2.data.trace_store import TraceStore
from recbole_dgr2.pipeline.trace_sources import Server, ServerSource, Showing
from tests.fake_server import ANSWER, KEY, Reply, completion, serving
from tests.reranking import COMPACT, ITEMS, task
from tests.trace_jobs import jobs, sampling


def source(
    address: str, mode: Mode = "rejection", words: PromptTemplate = COMPACT, **settings: Any
) -> ServerSource:
    pytest.importorskip("openai")
    chosen: dict[str, Any] = {"key": KEY, "timeout": 20.0, "concurrency": 2, "max_tokens": 64, **settings}
    return ServerSource(Server(address, **chosen), "m", Showing(words, ITEMS), sampling(mode))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries are a hundredth of what they are."""
    base = pytest.importorskip("openai._base_client")
    monkeypatch.setattr(base, "INITIAL_RETRY_DELAY", 0.005)
    monkeypatch.setattr(base, "MAX_RETRY_DELAY", 0.08)


def test_a_draft_and_what_was_asked_for() -> None:
    with serving(lambda number, request: completion()) as fake:
        ((job, draft),) = source(fake.address).write(jobs())
    assert job.task.key == 0
    assert draft.trace is not None
    assert draft.trace.answer.startswith('</think>{"explanation":"<c2> fits"')
    assert (draft.prompt_tokens, draft.completion_tokens) == (7, 5)
    (asked,) = fake.seen
    assert {name: asked[name] for name in ("model", "temperature", "max_completion_tokens")} == {
        "model": "m", "temperature": 1.0, "max_completion_tokens": 64,
    }  # fmt: skip
    assert asked["messages"][-1]["content"].endswith("rank:")
    assert fake.keys == [f"Bearer {KEY}"]


def test_drafts_keep_the_order_of_the_jobs_and_seeds_differ() -> None:
    def slow_first(number: int, request: dict[str, Any]) -> Reply:
        time.sleep(0.05 * (number == 0))
        return completion(ANSWER.replace("I like", f"{request['seed']}"))

    with serving(slow_first) as fake:
        writer = source(fake.address, concurrency=3)
        first = [(job.task.key, draft.trace) for job, draft in writer.write(jobs(9))]
        again = [(job.task.key, draft.trace) for job, draft in writer.write(jobs(9))]
        later = [(job.task.key, draft.trace) for job, draft in writer.write(jobs(9, attempt=1))]
    assert [key for key, _ in first] == list(range(9))
    assert first == again
    assert not {trace for _, trace in first} & {trace for _, trace in later}
    assert len({request["seed"] for request in fake.seen}) == 18
    assert 1 < fake.most <= 3, "no more requests under way than trace_concurrency allows"


def test_thinking_that_a_server_cuts_off_is_put_back() -> None:
    only = ANSWER.partition("</think>")[2]
    with serving(lambda number, request: completion(only, reasoning_content="I like <c2>")) as fake:
        ((_, draft),) = source(fake.address).write(jobs())
    assert draft.trace is not None
    assert draft.trace.reasoning == "<think>I like <c2>\n"


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (completion(reason="length"), UNFINISHED),
        (completion(""), "unparsed"),
        (completion("I would rather not."), "unparsed"),
        (completion(ANSWER, "content_filter"), UNFINISHED),
    ],
)
def test_answers_without_a_trace_are_faults_not_errors(reply: Reply, fault: str) -> None:
    with serving(lambda number, request: reply) as fake:
        ((_, draft),) = source(fake.address).write(jobs())
    assert draft == Draft(None, fault, 7, 5)
    assert len(fake.seen) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": {"message": "slow down"}}),
        (500, b"oops"),
        (503, {}),
        None,
        (200, b"{garbage"),
        (200, {"a": 1}),
    ],
    ids=["429", "500", "503", "hang-up", "garbage", "no completion"],
)
def test_passing_trouble_is_got_over(trouble: Any) -> None:
    with serving(lambda number, request: trouble if number < 2 else completion()) as fake:
        ((_, draft),) = source(fake.address).write(jobs())
    assert draft.trace is not None
    assert len(fake.seen) == 3
    assert len({request["seed"] for request in fake.seen}) == 1


@pytest.mark.usefixtures("quick")
def test_a_silent_server_is_asked_again() -> None:
    release = threading.Event()

    def silent(number: int, request: dict[str, Any]) -> Any:
        if number == 0:
            release.wait(30)
            return None
        return completion()

    with serving(silent) as fake:
        ((_, draft),) = source(fake.address, timeout=0.3).write(jobs())
        release.set()
    assert draft.trace is not None
    assert len(fake.seen) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("reply", "tries", "reason"),
    [
        ((429, {"error": {"message": "slow down"}}), 3, r"429.*\(3 tries, 20 s each\); run again"),
        ((500, b"oops"), 3, "run again to go on"),
        (None, 3, "run again to go on"),
        ((401, {"error": {"message": f"bad key {KEY}"}}), 1, r"401.*trace_api_key_env names"),
        ((404, {"error": {"message": "no model m"}}), 1, "404.*no model m"),
        ((200, b"{garbage"), 3, "no chat completion; expected the address"),
        ((200, b"<html>"), 3, "no chat completion"),
        ((200, {"choices": []}), 3, "no chat completion"),
    ],
    ids=["429", "500", "hang-up", "401", "404", "garbage", "page", "empty"],
)
def test_lasting_trouble_is_one_line_without_the_key(reply: Any, tries: int, reason: str) -> None:
    with serving(lambda number, request: reply) as fake:
        with pytest.raises(ConnectionError, match=reason) as caught:
            list(source(fake.address, tries=3).write(jobs()))
        text = str(caught.value)
        assert f"trace_base_url {fake.address}, model m, list 0" in text
    assert len(fake.seen) == tries
    assert "\n" not in text
    assert KEY not in text
    assert KEY not in repr(caught.value.__cause__)


def test_a_server_that_is_not_there(quick: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match="Connection error"):
        list(source(f"http://127.0.0.1:{port}/v1", tries=2).write(jobs()))


@pytest.mark.usefixtures("quick")
def test_a_failure_loses_nothing_that_was_paid_for(tmp_path: Path) -> None:
    """List 1 fails for good; what else was written is kept, and the next run asks for the rest alone."""
    given = [Problem(task(key=key), 1, "u", ("a", "b", "c")) for key in range(6)]

    def failing(number: int, request: dict[str, Any]) -> Reply:
        return (400, {"error": {"message": "no"}}) if number == 1 else completion()

    path = tmp_path / "traces.jsonl"
    with serving(failing) as fake:
        with pytest.raises(ConnectionError, match="400"):
            collect_lessons(given, source(fake.address, concurrency=1), TraceStore(path), sampling())
        kept = [attempt.key for attempt in TraceStore(path).attempts]
        asked = len(fake.seen)
        assert 0 in kept
        assert 1 not in kept
        assert len(kept) == asked - 1
        lessons, counts = collect_lessons(given, source(fake.address), TraceStore(path), sampling())
    assert len(lessons) == 6
    assert len(fake.seen) == asked + 6 - len(kept)
    assert counts.prompt_tokens == 6 * 7


def test_the_key_is_written_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = [Problem(task(key=key), 1, "u", ("a", "b", "c")) for key in range(3)]
    with caplog.at_level(logging.DEBUG), serving(lambda number, request: completion()) as fake:
        writer = source(fake.address)
        collect_lessons(given, writer, TraceStore(tmp_path / "traces.jsonl"), sampling())
    assert fake.keys == [f"Bearer {KEY}"] * 3
    assert KEY not in (tmp_path / "traces.jsonl").read_text(encoding="utf-8")
    assert KEY not in caplog.text
    assert KEY not in repr(Server(fake.address, KEY, 1.0, 1, 1))
