"""Writers of traces: a model in memory, and servers that answer, refuse, babble, hang up or say nothing."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.data.rejection import Draft, Job, Mode, Problem, SamplingOptions, collect_lessons
from recbole_dgr2.data.template import PromptTemplate, load_template
from recbole_dgr2.data.trace_reading import UNFINISHED, hint
from recbole_dgr2.data.trace_store import TraceStore
from recbole_dgr2.pipeline.trace_sources import LocalSource, Server, ServerSource, Showing, model_name
from recbole_dgr2.pipeline.views import trace_options
from recbole_dgr2.system.paths import prompt_file
from tests.fake_server import ANSWER, KEY, Reply, completion, serving
from tests.reranking import ITEMS, task, template
from tests.tiny import tiny_backbone

COMPACT = load_template(prompt_file("compact"))


def sampling(mode: Mode = "rejection", temperature: float = 1.0) -> SamplingOptions:
    return SamplingOptions(mode, 2, temperature, 0)


def jobs(count: int = 1, attempt: int = 0, note: int | None = None) -> list[Job]:
    return [Job(task(key=key), attempt, note) for key in range(count)]


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


def test_a_system_text_and_a_note_go_where_they_belong() -> None:
    items = ITEMS.__class__(ITEMS.titles, ITEMS.categories, ITEMS.brands, {i: f"<a_{i}>" for i in range(6)})
    gr2 = load_template(prompt_file("gr2"))
    showing = Showing(gr2, items)
    system, user = showing.messages(task(), None)
    assert system == {"role": "system", "content": gr2.fill("system")}
    assert user["role"] == "user"
    assert gr2.fill("system") not in user["content"]
    told = showing.messages(task(), 1)[1]["content"]
    assert told == user["content"].replace(gr2.fill("closing"), hint(1) + gr2.fill("closing"))
    assert "note" not in user["content"]


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


# a model in memory
def local(mode: Mode = "all", together: int = 4, words: PromptTemplate | None = None) -> LocalSource:
    showing = Showing(words or template(), ITEMS)
    return LocalSource(tiny_backbone(), "tiny", showing, sampling(mode), (12, together))


def test_a_random_model_writes_nothing_usable_and_tokens_are_counted() -> None:
    drafts = [draft for _, draft in local().write(jobs(6))]
    assert all(draft.trace is None and draft.fault for draft in drafts)
    assert all(draft.prompt_tokens > 20 and 1 <= draft.completion_tokens <= 12 for draft in drafts)


def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The model answers with ANSWER; the prompts that it was given."""
    from recbole_dgr2.decode.types import Completion, DecodeResult, DecodingTrace
    from recbole_dgr2.pipeline import trace_sources

    seen: list[tuple[int, ...]] = []

    def decode(model: object, requests: Any, options: Any, eos_id: int) -> DecodeResult:
        seen.extend(request.prompt_ids for request in requests)
        ids = tiny_backbone().tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
        nothing = DecodingTrace((), (), (), (), 1, 1.0, 1.0)
        made = (Completion(request.key, (*ids, eos_id), True, 1, nothing) for request in requests)
        return DecodeResult(tuple(made), 0.0, 0.0)

    monkeypatch.setattr(trace_sources, "decode", decode)
    return seen


def test_a_models_words_become_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    drafts = [draft for _, draft in local(words=COMPACT).write(jobs(3))]
    assert [draft.trace.reasoning if draft.trace else "" for draft in drafts] == ["<think>I like <c2>\n"] * 3


def test_the_note_stands_between_candidates_and_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = scripted(monkeypatch)
    writer = local("targeted")
    list(writer.write(jobs()))
    list(writer.write(jobs(note=1)))
    plain, told = (str(tiny_backbone().tokenizer.decode(ids)) for ids in seen)
    assert told == plain.replace("rank:", hint(1) + "rank:")
    assert writer.prompt(jobs()[0].task, 1) == told


def test_drafts_do_not_depend_on_the_batch() -> None:
    def texts(together: int) -> list[int]:
        return [draft.completion_tokens for _, draft in local(together=together).write(jobs(5))]

    assert texts(1) == texts(5)


def test_a_model_is_named_by_its_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "config.json").write_text("{}" if name != "c" else "{ }")
    first, second, third = (model_name(str(tmp_path / name / "m")) for name in "abc")
    assert first == second != third
    assert first.startswith("m-")
    assert model_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


# options
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"trace_source": "hf"}, "trace_model: trace_source hf needs a folder"),
        ({"trace_source": "openai"}, "trace_model: trace_source openai needs the model's name"),
        ({"trace_source": "openai", "trace_model": "m"}, "trace_base_url: trace_source openai needs one"),
        ({"trace_api_key_env": KEY}, "trace_api_key_env: expected the name of an environment variable"),
        ({"trace_mode": "rejection", "trace_temperature": 0.0}, "all 4 attempts would be the same"),
    ],
)
def test_options_that_do_not_fit(toy_config: Callable[..., Any], keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        trace_options(toy_config(**keys))
    assert KEY not in str(caught.value)
