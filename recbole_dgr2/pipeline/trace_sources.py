"""Language models that write reasoning traces: a local one (`hf`), or any OpenAI-compatible server (`openai`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recbole_dgr2.data.chat import end_with_turn, frame_of
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import PromptBuilder, render_prompt
from recbole_dgr2.data.rejection import Draft, Job, SamplingOptions
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_reading import hint, read_trace
from recbole_dgr2.decode.engine import decode
from recbole_dgr2.decode.types import Completion, DecodeOptions, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.system.cache import digest_of

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

TRIES = 6
"""Tries of a request that the server refuses for now (429, 5xx) or does not answer in time; the waits between them
double from half a second to eight, less up to a quarter at random, or are what the server asks for."""
GARBLED_TRIES = 3
"""Tries of a request that is answered with something else than a chat completion."""

_NO_KEY = "none"  # the client library wants a key; servers without keys ignore it
_SEED_RANGE = 2**31
_MIB = 2**20


@dataclass(frozen=True)
class Showing:
    """What a writer is shown: the prompt of the lessons, and a note before its last words where there is one."""

    template: PromptTemplate
    item_text: ItemText

    def messages(self, task: RankingTask, note: int | None) -> list[dict[str, str]]:
        """The prompt of a task as a conversation, with the history that the template lists."""
        frame, system = frame_of(self.template, None), self.template.fill("system")
        *pieces, closing = render_prompt(self.template, self.item_text, task, self.template.history_items)
        text = "".join((*pieces, "" if note is None else hint(note), closing.removesuffix(frame.tail)))
        user = {"role": "user", "content": text.removeprefix(frame.head)}
        return [{"role": "system", "content": system}, user] if system else [user]

    def text(self, task: RankingTask, note: int | None) -> str:
        """The same as one text."""
        return "\n".join(message["content"] for message in self.messages(task, note))


class LocalSource:
    """A causal language model in memory, decoded autoregressively, in the form of its own chat template.

    Args:
        backbone: the writer; its EOS becomes the end of a turn.
        model: its name.
        showing: its prompts.
        options: of the samples.
        sizes: most tokens of a response, and lists decoded together.

    Raises:
        ValueError: its chat template does not fit the prompt, or its positions leave no room for prompts.
    """

    name = "hf"

    def __init__(
        self,
        backbone: Backbone,
        model: str,
        showing: Showing,
        options: SamplingOptions,
        sizes: tuple[int, int],
    ) -> None:
        self.model = model
        self._backbone = backbone
        self._showing = showing
        self._options = options
        self._longest, self._together = sizes
        end_with_turn(showing.template, backbone.tokenizer)
        note = max((len(self._ids(hint(slot))) for slot in range(100)), default=0)
        positions = int(backbone.model.config.max_position_embeddings)
        room = positions - self._longest - (note if options.mode == "targeted" else 0)
        self._prompts = PromptBuilder(showing.template, showing.item_text, backbone.tokenizer, room)

    def prompt(self, task: RankingTask, note: int | None) -> str:
        """The messages."""
        return self._showing.text(task, note)

    def write(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Draft]]:
        """Drafts, one batch after the other."""
        for begin in range(0, len(jobs), self._together):
            part = jobs[begin : begin + self._together]
            requests = [Request(job.task.key, self._request(job)) for job in part]
            options = DecodeOptions(
                "autoregressive",
                self._longest,
                self._together,
                temperature=self._options.temperature,
                seed=self._options.seed + part[0].attempt,
            )
            result = decode(self._backbone.model, requests, options, eos_id=self._backbone.eos_id)
            for job, request, completion in zip(part, requests, result.completions, strict=True):
                yield job, self._draft(job, len(request.prompt_ids), completion)

    def _request(self, job: Job) -> tuple[int, ...]:
        """Token ids of a prompt, the note between the candidates and what follows them."""
        prompt = self._prompts.build(job.task)
        end = prompt.candidate_spans[-1][1]
        note = () if job.note is None else self._ids(hint(job.note))
        return (*prompt.token_ids[:end], *note, *prompt.token_ids[end:])

    def _draft(self, job: Job, read: int, completion: Completion) -> Draft:
        kept = [token for token in completion.token_ids if token != self._backbone.eos_id]
        text = str(self._backbone.tokenizer.decode(kept))
        n, template = len(job.task.candidates), self._showing.template
        trace, fault = read_trace(text, n, completion.finished, template, job.note is not None)
        return Draft(trace, fault, read, len(completion.token_ids))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._backbone.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server. key: None where it wants none; never shown, logged or stored.

    timeout: seconds that a request may wait for an answer. concurrency: requests under way at a time. max_tokens: of
    an answer. tries: see TRIES.
    """

    base_url: str
    key: str | None
    timeout: float
    concurrency: int
    max_tokens: int
    tries: int = TRIES

    def __repr__(self) -> str:
        return f"Server({self.base_url!r})"


class ServerSource:
    """A model behind the chat completions of a server (OpenAI's, vLLM, SGLang, `transformers serve`)."""

    name = "openai"

    def __init__(self, server: Server, model: str, showing: Showing, options: SamplingOptions) -> None:
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "trace_source openai: the package openai is not installed; pip install 'recbole_dgr2[openai]'"
            ) from error
        self.model = model
        self._server = server
        self._showing = showing
        self._options = options
        self._errors = openai.OpenAIError
        self._client = openai.OpenAI(
            base_url=server.base_url,
            api_key=server.key or _NO_KEY,
            timeout=server.timeout,
            max_retries=server.tries - 1,
        )

    def prompt(self, task: RankingTask, note: int | None) -> str:
        """The messages."""
        return self._showing.text(task, note)

    def write(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Draft]]:
        """Drafts in the order of the jobs.

        Raises:
            ConnectionError: a request failed for good; those that were under way are waited for and given first.
        """
        failed: ConnectionError | None = None
        with ThreadPoolExecutor(self._server.concurrency) as pool:
            futures: list[Future[Draft]] = [pool.submit(self._draft, job) for job in jobs]
            try:
                for job, future in zip(jobs, futures, strict=True):
                    if future.cancelled():
                        continue
                    error = future.exception()
                    if error is None:
                        yield job, future.result()
                        continue
                    for other in futures:
                        other.cancel()
                    if not isinstance(error, ConnectionError):
                        raise error
                    failed = failed or error
            finally:
                for future in futures:
                    future.cancel()
        if failed is not None:
            raise failed

    def _draft(self, job: Job) -> Draft:
        answer = self._ask(job)
        choice, usage = answer.choices[0], answer.usage
        apart = getattr(choice.message, "reasoning_content", None)  # servers that cut the thinking off
        text = (f"<think>{apart}</think>" if apart else "") + (choice.message.content or "")
        finished, told = choice.finish_reason == "stop", job.note is not None
        trace, fault = read_trace(text, len(job.task.candidates), finished, self._showing.template, told)
        if usage is None:
            return Draft(trace, fault)
        return Draft(trace, fault, usage.prompt_tokens, usage.completion_tokens)

    def _ask(self, job: Job) -> ChatCompletion:
        where = f"trace_base_url {self._server.base_url}, model {self.model}, list {job.task.key}"
        messages: Any = self._showing.messages(job.task, job.note)
        for _ in range(GARBLED_TRIES):
            try:
                answer: Any = self._client.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    temperature=self._options.temperature,
                    seed=_seed(self._options.seed, job),
                    max_completion_tokens=self._server.max_tokens,
                )
            except self._errors as error:
                raise ConnectionError(f"{where}: {self._reason(error)}") from None
            except json.JSONDecodeError:
                continue
            if getattr(answer, "choices", None) and answer.choices[0].message is not None:
                return answer
        raise ConnectionError(
            f"{where}: the server's answer is no chat completion; expected the address of an OpenAI-compatible "
            "server, e.g. http://localhost:8000/v1"
        )

    def _reason(self, error: Exception) -> str:
        """What went wrong, in one line, without the key."""
        text = " ".join(str(error).split())[:300]
        if self._server.key:
            text = text.replace(self._server.key, "***")
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            return f"{text}; trace_api_key_env names the environment variable that holds the key"
        if status is not None and status != 429 and status < 500:
            return text
        return f"{text} ({self._server.tries} tries, {self._server.timeout:g} s each); run again to go on from here"


def _seed(seed: int, job: Job) -> int:
    """A seed that the run, the list and the attempt decide."""
    text = f"{seed} {job.task.key} {job.attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % _SEED_RANGE


def model_name(folder: str) -> str:
    """What a local model is called in a store: the last part of its folder with a digest of its files, so that other
    weights in an equal folder count as another writer; or its name on a hub.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        return folder
    files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".jinja"))
    return f"{path.resolve().name}-{digest_of({file.name: _ends(file) for file in files})[:12]}"


def _ends(path: Path) -> str:
    """Digest of a file's size and of its first and last MiB: weights are too large to be read for their name."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_MIB)
        file.seek(max(size - _MIB, 0))
        return hashlib.sha256(str(size).encode() + first + file.read(_MIB)).hexdigest()
