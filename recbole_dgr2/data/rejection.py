"""Rejection sampling of reasoning traces: a source writes, what is wrong is turned down and written again.

Modes, after GR2 (Section 3): `rejection` hides the target and samples until the first item of the answer is the
target; `targeted` shows it to the writer in a note that is no part of the lesson; `all` keeps every valid trace. Only
the first item is compared. A list without a kept trace within the budget of attempts is dropped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.lessons import Lesson
from recbole_dgr2.data.prompt import render_prompt
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_reading import hint
from recbole_dgr2.data.trace_store import Acceptance, Attempt, Settings, TraceStore, acceptance
from recbole_dgr2.data.traces import Trace, write_evidence_trace

Mode = Literal["all", "rejection", "targeted"]
NOT_FIRST = "target not first"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """A list that a trace is wanted for. slot: of the target, None where it is no candidate. user, items: external
    ids of the user and the candidates."""

    task: RankingTask
    slot: int | None
    user: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One attempt to be made. note: slot of the target where the writer is told, else None."""

    task: RankingTask
    attempt: int
    note: int | None = None


@dataclass(frozen=True)
class Draft:
    """What came of a job: a trace, or None and the fault; tokens read and written where the source counts them."""

    trace: Trace | None
    fault: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TraceSource(Protocol):
    """Writes traces."""

    @property
    def name(self) -> str:
        """Name of the kind of source."""
        ...

    @property
    def model(self) -> str:
        """Name of the writer."""
        ...

    def prompt(self, task: RankingTask, note: int | None) -> str:
        """Everything that the writer is shown."""
        ...

    def write(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Draft]]:
        """The drafts of all jobs, in their order unless a job fails; raises at the end where one did.

        The jobs of one call are of one attempt, each at another list.
        """
        ...


@dataclass(frozen=True)
class SamplingOptions:
    """How traces are sampled. attempts: most attempts a list. temperature, seed: of the samples. max_tokens: of an
    answer, 0 where there is no limit. form: digest of what the template says of traces."""

    mode: Mode
    attempts: int
    temperature: float
    seed: int
    max_tokens: int = 0
    form: str = ""


class EvidenceSource:
    """The embedded reasoner as a writer. Its first attempt takes the best candidate, further ones sample.

    Noise from the Gumbel distribution on utilities makes a candidate come first with the probability that the logit
    gives it (Maddison et al. 2014); a sampled trace states the scores that decided it. A note puts the target first.
    """

    name = "evidence"

    def __init__(
        self, reasoner: Reasoner, template: PromptTemplate, item_text: ItemText, options: SamplingOptions
    ) -> None:
        self._reasoner = reasoner
        self._template = template
        self._item_text = item_text
        self._options = options

    @property
    def model(self) -> str:
        """Name of the reasoner, by its weights."""
        weights = b"".join(np.ascontiguousarray(part).tobytes() for part in vars(self._reasoner).values())
        return f"conditional-logit-{hashlib.sha256(weights).hexdigest()[:12]}"

    def prompt(self, task: RankingTask, note: int | None) -> str:
        """The lesson's prompt, and the note."""
        shown = "".join(render_prompt(self._template, self._item_text, task, self._template.history_items))
        return shown if note is None else shown + hint(note)

    def write(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Draft]]:
        """Traces of all jobs."""
        for job in jobs:
            scores = self._scores(job)
            yield (
                job,
                Draft(
                    write_evidence_trace(job.task, self._reasoner, self._template, self._item_text, scores)
                ),
            )

    def _scores(self, job: Job) -> np.ndarray:
        """int64 [N], none below 0."""
        scores = self._reasoner.scores(job.task.levels)
        if job.attempt:
            random = np.random.default_rng((self._options.seed, job.task.key, job.attempt))
            noise = (
                self._options.temperature * self._reasoner.points_per_unit * random.gumbel(size=len(scores))
            )
            noisy = np.rint(scores + noise - noise.mean()).astype(np.int64)
            scores = noisy - min(noisy.min(), 0)
        if job.note is not None:
            others = np.delete(scores, job.note)
            scores[job.note] = max(scores[job.note], others.max(initial=-1) + 1)
        return scores


def settings_of(source: TraceSource, options: SamplingOptions) -> Settings:
    """What decides the text of a source's attempts."""
    sampled = (options.temperature, options.seed, options.max_tokens, options.form)
    return Settings(source.name, source.model, options.mode, *sampled)


def collect_lessons(
    problems: Sequence[Problem], source: TraceSource, store: TraceStore, options: SamplingOptions
) -> tuple[list[Lesson], Acceptance]:
    """A lesson for every list that gets a trace, in the order of the lists, and what the attempts came to.

    Attempts already in `store` are used again; new ones go into it one by one, so that a run that is stopped loses
    none. Outside mode "all", lists whose target is no candidate are left out: no trace could be accepted.

    Raises:
        ValueError: no list got a trace. Whatever the source raises, after what it had written is kept.
    """
    settings = settings_of(source, options)
    wanted = [problem for problem in problems if options.mode == "all" or problem.slot is not None]
    desk = _Desk(source, store, settings, wanted)
    for number in range(options.attempts):
        desk.attempt(number)
    attempts = [attempt for problem in wanted for attempt in desk.found(problem)[: options.attempts]]
    counts = acceptance(attempts)
    if wanted and not counts.accepted:
        reason, count = next(iter(counts.faults.items()))
        raise ValueError(
            f"trace_source {source.name}, trace_mode {options.mode}: none of {len(wanted)} lists got a trace in "
            f"{counts.attempts} attempts, {count} of them turned down as {reason!r}; raise trace_attempts or "
            "max_new_tokens, or use another trace_model"
        )
    kept = {attempt.key: attempt.trace for attempt in attempts if attempt.accepted}
    lessons = [Lesson(problem.task, kept[problem.task.key]) for problem in wanted if problem.task.key in kept]
    return lessons, counts


class _Desk:
    """Gives jobs to a source, judges what comes back, and files it."""

    def __init__(
        self, source: TraceSource, store: TraceStore, settings: Settings, problems: Sequence[Problem]
    ) -> None:
        self._source = source
        self._store = store
        self._settings = settings
        self._problems = {problem.task.key: problem for problem in problems}
        self._shown = {
            key: hashlib.sha256(source.prompt(problem.task, self._note(problem)).encode()).hexdigest()[:24]
            for key, problem in self._problems.items()
        }

    def found(self, problem: Problem) -> list[Attempt]:
        """The attempts at a list so far."""
        key = problem.task.key
        return self._store.find(key, self._shown[key], self._settings)

    def attempt(self, number: int) -> None:
        """Make attempt `number` at every list that has neither made it nor got a trace before."""
        jobs = []
        for problem in self._problems.values():
            made = self.found(problem)
            if len(made) == number and not any(attempt.accepted for attempt in made):
                jobs.append(Job(problem.task, number, self._note(problem)))
        if not jobs:
            return
        accepted = 0
        for job, draft in self._source.write(jobs):
            attempt = self._judge(job, draft)
            self._store.append(attempt)
            accepted += attempt.accepted
        logger.info("traces: attempt %d: %d of %d lists got one", number + 1, accepted, len(jobs))

    def _note(self, problem: Problem) -> int | None:
        return problem.slot if self._settings.mode == "targeted" else None

    def _judge(self, job: Job, draft: Draft) -> Attempt:
        problem = self._problems[job.task.key]
        trace, fault = draft.trace, draft.fault
        if trace is not None and self._settings.mode != "all":
            order = parse_ranking(trace.answer, len(job.task.candidates), finished=True).order
            fault = "" if order[0] == problem.slot else NOT_FIRST
        kept = Trace("", "") if trace is None or fault else trace
        return Attempt(
            key=job.task.key,
            user=problem.user,
            items=problem.items,
            **vars(self._settings),
            attempt=job.attempt,
            prompt=self._shown[job.task.key],
            prompt_tokens=draft.prompt_tokens,
            completion_tokens=draft.completion_tokens,
            fault=fault,
            reasoning=kept.reasoning,
            answer=kept.answer,
        )
