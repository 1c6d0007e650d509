"""The decoding engine: one scheduler for every mode.

Rows advance on their own; a finished row leaves, and a waiting prompt takes its slot; when no prompt waits, the live
rows close up and the batch shrinks. The common prefix of all prompts is prefilled once. What a row feeds and keeps is
the business of a policy (`autoregressive`, `block`, `speculative`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from recbole_dgr2.decode.auto import decode_auto, known_of
from recbole_dgr2.decode.cache import SlotCache
from recbole_dgr2.decode.costs import PassCosts, measure_pass_costs
from recbole_dgr2.decode.modes import check_requests, policy_of
from recbole_dgr2.decode.policy import Policy
from recbole_dgr2.decode.types import Completion, DecodeOptions, DecodeResult, Request
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.forward import bidirectional, forward_cached

PREFIX_LEAST = 8  # a shorter common prefix does not pay for the forward of its own
PREFILL_TOKENS = 16384  # most prompt tokens of one prefill forward: bounds its memory


def decode(
    model: torch.nn.Module,
    requests: Sequence[Request],
    options: DecodeOptions,
    *,
    eos_id: int,
    spec: BlockDiffusionSpec | None = None,
    progress: Callable[[int], None] | None = None,
) -> DecodeResult:
    """Complete every request; completions come back in the order of the requests.

    model: a Hugging Face causal LM. eos_id: the token that ends a completion. spec: of a converted model; needed in
    mode "block", and in any mode its mask token is never emitted. progress: called with the number of finished
    requests whenever it grows. A row's completion does not depend on the other requests (up to rounding).

    Errors (ValueError, one line): a mode that the model was not converted for (no spec; "speculative" with context
    "block"), a block size above the trained one, an empty prompt, a token outside the vocabulary, a prompt that leaves
    no room for max_new_tokens in the model's positions.
    """
    check_requests(model, requests, options, spec)
    if options.mode == "auto":
        part = _Part(model, eos_id, spec, progress)
        costs = partial(_measure, model, requests, options)
        return decode_auto(part, costs, requests, options, spec, known_of(model))
    return run_policy(model, requests, options, policy_of(options, eos_id, spec), progress)


def run_policy(
    model: torch.nn.Module,
    requests: Sequence[Request],
    options: DecodeOptions,
    policy: Policy,
    progress: Callable[[int], None] | None = None,
) -> DecodeResult:
    """Complete every request by a policy made for it; see `decode`, which makes one of the options."""
    if not requests:
        return DecodeResult((), 0.0, 0.0)
    with torch.inference_mode(), _evaluating(model):
        return _Scheduler(model, requests, options.batch_size, options.max_new_tokens, policy, progress).run()


@dataclass
class _Part:
    """Decodes one part of the requests of an "auto" call; progress counts on from the parts before."""

    model: torch.nn.Module
    eos_id: int
    spec: BlockDiffusionSpec | None
    progress: Callable[[int], None] | None
    finished: int = 0

    def __call__(self, requests: Sequence[Request], options: DecodeOptions) -> DecodeResult:
        before, progress = self.finished, self.progress
        counted = None if progress is None else lambda count: progress(before + count)
        self.finished += len(requests)
        return decode(self.model, requests, options, eos_id=self.eos_id, spec=self.spec, progress=counted)


def _measure(
    model: torch.nn.Module, requests: Sequence[Request], options: DecodeOptions, answer: float
) -> PassCosts:
    """Pass costs half-way through answers of `answer` tokens, in the batch that these requests make."""
    prompt = sum(len(request.prompt_ids) for request in requests) / len(requests)
    with _evaluating(model):
        return measure_pass_costs(model, min(options.batch_size, len(requests)), round(prompt + answer / 2))


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off inside and passes without a mask bidirectional, the model's own mode back afterwards."""
    training = model.training
    model.eval()
    try:
        with bidirectional(model):
            yield
    finally:
        model.train(training)


def _common_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with: those that the first and the last in sorted order share."""
    first, last = min(prompts), max(prompts)
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(last)))


class _Scheduler:
    """Requests, cache and offsets of one `decode` call. Live rows are always slots 0..n-1."""

    def __init__(
        self,
        model: torch.nn.Module,
        requests: Sequence[Request],
        slots: int,
        max_new_tokens: int,
        policy: Policy,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.model, self.requests, self.policy, self.progress = model, requests, policy, progress
        self.device = next(model.parameters()).device
        self.slots = min(slots, len(requests))
        longest = max(len(request.prompt_ids) for request in requests)
        # the last block may begin at the last allowed token and still needs q places
        self.cache = SlotCache(self.slots, longest + max_new_tokens + policy.query, self.device)
        self.keys = torch.arange(self.cache.length, device=self.device)
        self.ones = torch.ones_like(self.keys, dtype=torch.bool)
        self.query = np.arange(policy.query)
        self.offsets = np.zeros(self.slots, dtype=np.int64)
        self.owner = [0] * self.slots  # index of the request in each slot
        self.waiting = 0  # index of the next request in line
        self.completions: list[Completion | None] = [None] * len(requests)
        self.finished = 0
        self.prefix = 0
        self.prefill_seconds = 0.0

    def run(self) -> DecodeResult:
        """Decode all requests."""
        begin = time.perf_counter()
        self._prefill_prefix()
        n = self._settle(self.slots, list(range(self.slots)))
        while n:
            self._step(n)
            free = [row for row in range(n) if self.policy.done(row)]
            if free:
                for row in free:
                    self._complete(row)
                n = self._settle(n, free)
        seconds = time.perf_counter() - begin - self.prefill_seconds
        completions = tuple(completion for completion in self.completions if completion is not None)
        return DecodeResult(completions, self.prefill_seconds, seconds)

    def _step(self, n: int) -> None:
        """One shared forward of rows 0..n-1."""
        plan, offsets = self.policy.plan(n), self.offsets[:n]
        q = plan.ids.shape[1]
        end = self.cache.write_rows(offsets, q)
        positions = offsets[:, None] + self.query[:q]
        if plan.visible.min() < q or offsets.min() < end - q:
            limits = self._tensor(offsets[:, None] + plan.visible)
            allowed: torch.Tensor | None = self.keys[:end] < limits[:, :, None]
        else:  # rows at one offset, each query sees every key
            allowed = self._open_mask(n, q, end)
        logits = forward_cached(
            self.model,
            self._tensor(plan.ids),
            self._tensor(positions),
            allowed,
            self.cache,
            self._tensor(plan.rows),
            self._tensor(plan.cols),
        )
        offsets += self.policy.update(logits)

    def _open_mask(self, n: int, q: int, end: int) -> torch.Tensor | None:
        """Mask [n, q, end] that hides nothing. None leaves SDPA its fastest kernel; for one query on a CPU, where the
        kernels do not differ, ones are quicker, since transformers then builds no mask of its own.
        """
        if q == 1 and self.device.type == "cpu":
            return self.ones[:end].expand(n, 1, end)
        return None

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _complete(self, row: int) -> None:
        """Hand the answer of `row` in."""
        self.completions[self.owner[row]] = self.policy.finish(row)
        self.finished += 1
        if self.progress is not None:
            self.progress(self.finished)

    def _settle(self, n: int, free: list[int]) -> int:
        """Fill the free ones of rows 0..n-1 with waiting requests, close up the rest; the new number of live rows."""
        while free and self.waiting < len(self.requests):
            rows = self._admit(free)
            free = free[len(rows) :]
            for row in rows:
                if self.policy.done(row):  # its first token was its last
                    self._complete(row)
                    free.append(row)
        for hole in sorted(free, reverse=True):
            n -= 1
            if hole != n:
                self.cache.move(n, hole, int(self.offsets[n]))
                self.policy.move(n, hole)
                self.offsets[hole], self.owner[hole] = self.offsets[n], self.owner[n]
        return n

    def _prefill_prefix(self) -> None:
        """Run the common prefix of all prompts once and copy its keys into every slot."""
        prompts = [request.prompt_ids for request in self.requests]
        length = min(
            _common_length(prompts), min(map(len, prompts)) - 1
        )  # each keeps a token of its own to score
        if len(prompts) == 1 or length < PREFIX_LEAST:
            return
        begin = time.perf_counter()
        self._prefill([0], np.asarray([prompts[0][:length]]), np.asarray([length]))
        self.cache.share_prefix(length)
        self.prefix = length
        self.prefill_seconds += time.perf_counter() - begin

    def _admit(self, free: list[int]) -> list[int]:
        """Prefill as many waiting requests as fit one forward into the first free rows; give those rows."""
        begin = time.perf_counter()
        tails: list[tuple[int, ...]] = []
        width = 0
        for request in self.requests[self.waiting : self.waiting + len(free)]:
            width = max(width, len(request.prompt_ids) - self.prefix)
            if tails and width * (len(tails) + 1) > PREFILL_TOKENS:
                break
            tails.append(request.prompt_ids[self.prefix :])
        rows = free[: len(tails)]
        lengths = np.asarray([len(tail) for tail in tails])
        ids = np.zeros((len(tails), lengths.max()), dtype=np.int64)
        for index, tail in enumerate(tails):
            ids[index, : len(tail)] = tail
        logits = self._prefill(rows, ids, lengths)
        keys = [request.key for request in self.requests[self.waiting : self.waiting + len(tails)]]
        self.policy.start(rows, keys, logits)
        for index, row in enumerate(rows):
            self.offsets[row] = self.prefix + lengths[index]
            self.owner[row] = self.waiting + index
        self.waiting += len(rows)
        self.prefill_seconds += time.perf_counter() - begin
        return rows

    def _prefill(self, rows: list[int], ids: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Causal forward of ids [m, q], right-padded, after the shared prefix; logits [m, V] after each last token.

        Keys of padding stay in the slot: they lie beyond the row's offset, hidden until they are overwritten.
        """
        m, q = ids.shape
        end = self.cache.write_slots(rows, self.prefix, q)
        positions = torch.arange(self.prefix, end, device=self.device)
        allowed = self.keys[:end] <= positions[:, None]
        return forward_cached(
            self.model,
            self._tensor(ids),
            positions.expand(m, q),
            allowed.expand(m, q, end),
            self.cache,
            torch.arange(m, device=self.device),
            self._tensor(lengths - 1),
        )
