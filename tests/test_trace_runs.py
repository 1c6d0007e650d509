"""Whole runs whose traces are written by a server or a local model, and a real server behind the source."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from recbole_dgr2.data.trace_store import TraceStore
from recbole_dgr2.pipeline.trace_sources import Server, ServerSource, Showing
from tests.fake_server import KEY, Reply, completion, serving
from tests.reranking import ITEMS, template
from tests.tiny import tiny_backbone
from tests.toy_run import run
from tests.trace_jobs import jobs, sampling


# a whole run
@pytest.mark.slow
def test_a_run_with_traces_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Traces are kept between runs, the lessons are all that is trained on, and the key ends up in no file."""
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWN_KEY", KEY)

    def guess(number: int, request: dict[str, Any]) -> Reply:
        names = re.findall(r"<c\d+>", request["messages"][-1]["content"])
        first = request["seed"] % len(names)
        order = [names[first], *names[:first], *names[first + 1 :]]
        content = json.dumps({"explanation": f"{names[first]} fits", "recommendations": order})
        return completion(f"I like {names[first]}.\n{content}")

    with serving(guess) as fake:
        keys: dict[str, Any] = {
            "stages": ["ar_teacher"],
            "cache_dir": str(tmp_path / "kept"),
            "trace_source": "openai",
            "trace_mode": "rejection",
            "trace_model": "m",
            "trace_base_url": fake.address,
            "trace_api_key_env": "OWN_KEY",
        }
        with caplog.at_level(logging.INFO):
            report = run(tmp_path, **keys)
        asked = len(fake.seen)
        run(tmp_path, **keys)
    assert asked > 0
    assert len(fake.seen) == asked, "written traces are used again"
    (stored,) = (tmp_path / "kept").glob("traces-toy-*.jsonl")
    attempts = TraceStore(stored).attempts
    assert len(attempts) == asked
    assert "accepted within 1: 0." in caplog.text
    assert all(attempt.items and attempt.user for attempt in attempts)
    assert {row["name"] for row in report["rows"]} >= {"retriever", "ar_teacher"}
    training, validation = report["traces"]
    assert (training["phase"], validation["phase"]) == ("training", "validation")
    assert training["attempts"] + validation["attempts"] == asked
    assert training["completion_tokens"] == 5 * training["attempts"]
    assert 0 < training["accepted"] <= training["lists"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_run_whose_writer_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random local model: its attempts are kept, and the run says that none was of use before it trains anything."""
    monkeypatch.chdir(tmp_path)
    writer = tmp_path / "writer"
    tiny_backbone().model.save_pretrained(writer)
    tiny_backbone().tokenizer.save_pretrained(writer)
    keys: dict[str, Any] = {"stages": ["ar_teacher"], "max_train_lists": 4, "max_new_tokens": 16}
    keys |= {"trace_source": "hf", "trace_mode": "rejection", "trace_attempts": 2, "trace_model": str(writer)}
    with pytest.raises(
        ValueError, match="trace_source hf, trace_mode rejection: none of 4 lists got a trace in 8"
    ):
        run(tmp_path, **keys)
    (stored,) = tmp_path.rglob("traces.jsonl")  # nothing is cached, so the run's folder keeps them
    attempts = TraceStore(stored).attempts
    assert [attempt.attempt for attempt in attempts] == [0] * 4 + [1] * 4
    assert all(attempt.model.startswith("writer-") and attempt.completion_tokens for attempt in attempts)


def test_a_run_asks_for_its_key_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    keys = {"trace_source": "openai", "trace_model": "m", "trace_base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(ValueError, match="trace_api_key_env: the environment has no NO_SUCH_KEY; set it"):
        run(tmp_path, **keys, trace_api_key_env="NO_SUCH_KEY")
    assert not (tmp_path / "saved").exists()


# a real server
@contextmanager
def transformers_serve(folder: Path) -> Iterator[str]:
    """`transformers serve` with the model of a folder, on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=log, stderr=log)
    try:
        for _ in range(600):
            if process.poll() is not None:
                break
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)
        log.close()


@pytest.mark.slow
def test_against_transformers_serve(tmp_path: Path) -> None:
    """A tiny random model behind a real server: answers come back, tokens are counted, nothing of it is a trace."""
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}")
    backbone = tiny_backbone()
    backbone.model.save_pretrained(tmp_path)
    tokenizer = backbone.tokenizer.__class__.from_pretrained(saved_tokenizer(tmp_path))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    with transformers_serve(tmp_path) as address:
        writer = ServerSource(
            Server(address, None, 120.0, 2, 16), str(tmp_path), Showing(template(), ITEMS), sampling("all")
        )
        drafts = [draft for _, draft in writer.write(jobs(3))]
        assert all(draft.trace is None and draft.fault for draft in drafts)
        read = len(tokenizer(writer.prompt(jobs()[0].task, None))["input_ids"])
        assert [draft.prompt_tokens for draft in drafts] == [read] * 3
        assert all(1 <= draft.completion_tokens <= 16 for draft in drafts)
        other = ServerSource(
            Server(address, None, 120.0, 1, 16, tries=1), "absent", Showing(template(), ITEMS), sampling()
        )
        with pytest.raises(ConnectionError, match="model absent, list 0"):
            list(other.write(jobs()))


def saved_tokenizer(folder: Path) -> str:
    tiny_backbone().tokenizer.save_pretrained(folder)
    return str(folder)
