"""An OpenAI-compatible server on this machine that does what a test tells it to."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-very-secret-0123456789"
ANSWER = '<think>I like <c2></think>{"explanation":"<c2> fits","recommendations":["<c2>","<c1>","<c3>"]}'

Reply = tuple[int, Any]


def completion(text: str = ANSWER, reason: str = "stop", **message: Any) -> Reply:
    choice = {
        "index": 0,
        "finish_reason": reason,
        "message": {"role": "assistant", "content": text, **message},
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    return 200, body


@dataclass
class Fake:
    """Answers request number i, from 0, with `replies(i, request)`; a reply of None hangs up, a float waits first."""

    replies: Callable[[int, dict[str, Any]], Any]
    address: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    busy: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(replies: Callable[[int, dict[str, Any]], Any]) -> Iterator[Fake]:
    fake = Fake(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                number = len(fake.seen)
                fake.seen.append(request)
                fake.keys.append(self.headers["Authorization"])
                fake.busy += 1
                fake.most = max(fake.most, fake.busy)
            try:
                self.answer(fake.replies(number, request))
            finally:
                with fake.lock:
                    fake.busy -= 1

        def answer(self, reply: Any) -> None:
            if reply is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            status, body = reply
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *parts: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.address = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
