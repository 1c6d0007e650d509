"""Rejection sampling: what is kept puts the target first, what is dropped never comes back, and nobody is told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template

import numpy as np
import pytest

from recbole_dgr2.data.lessons import encode_lessons, lesson_texts
from recbole_dgr2.data.prompt import PromptBuilder, label, render_prompt
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.data.rejection import (
    NOT_FIRST,
    Draft,
    EvidenceSource,
    Job,
    Mode,
    Problem,
    SamplingOptions,
    collect_lessons,
    settings_of,
)
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.trace_reading import hint
from recbole_dgr2.data.trace_store import TraceStore
from recbole_dgr2.data.traces import Trace, write_evidence_trace
from recbole_dgr2.model.backbone import train_tokenizer
from tests.reranking import COMPACT, ITEMS, WITH_SIDS, named_template, reasoner, task, template


def options(mode: Mode = "rejection", attempts: int = 4, seed: int = 0) -> SamplingOptions:
    return SamplingOptions(mode, attempts, 1.0, seed)


def problems(count: int = 40, n: int = 3) -> list[Problem]:
    """Lists with random facts; the target is the reasoner's favourite in some, anything else in others."""
    random = np.random.default_rng(5)
    found = []
    for key in range(count):
        levels = random.integers(0, 4, size=(n, 2)).tolist()
        given = task(candidates=tuple(random.integers(1, 6, size=n).tolist()), levels=levels, key=key)
        slot = None if key % 10 == 9 else int(random.integers(n))
        found.append(Problem(given, slot, f"u{key}", tuple(f"i{item}" for item in given.candidates)))
    return found


def evidence(given: SamplingOptions) -> EvidenceSource:
    return EvidenceSource(reasoner(), template(), ITEMS, given)


class Script:
    """Writes what it is told to: `script[key]` are the first slots of its attempts, None: no trace."""

    name, model = "script", "own"

    def __init__(self, script: dict[int, list[int | None]], break_after: int = 10**9) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.left = break_after

    def prompt(self, task: RankingTask, note: int | None) -> str:
        return f"list {task.key}" + ("" if note is None else hint(note))

    def write(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Draft]]:
        for job in jobs:
            if self.left == 0:
                raise ConnectionError("gone")
            self.left -= 1
            self.jobs.append(job)
            first = self.script[job.task.key][job.attempt]
            if first is None:
                yield job, Draft(None, "unparsed", 3, 4)
                continue
            order = [first, *(slot for slot in range(3) if slot != first)]
            named = ",".join(f'"{label(slot)}"' for slot in order)
            yield job, Draft(Trace("because", f'{{"recommendations":[{named}]}}'), "", 3, 4)


def first_slot(trace: Trace) -> int:
    return parse_ranking(trace.text, 3, finished=True).order[0]


# the loop
def scripted(mode: Mode, script: dict[int, list[int | None]], slots: dict[int, int | None], store: TraceStore,
             attempts: int = 3) -> tuple[Script, list[int], list[int]]:  # fmt: skip
    source = Script(script)
    given = [Problem(task(key=key), slot, "u", ("a", "b", "c")) for key, slot in slots.items()]
    lessons, counts = collect_lessons(given, source, store, options(mode, attempts))
    return source, [lesson.task.key for lesson in lessons], list(counts.by_attempt)


def test_only_the_first_item_is_compared_and_failures_are_dropped(tmp_path: Path) -> None:
    script: dict[int, list[int | None]] = {1: [2], 2: [0, None, 1], 3: [0, 0, 0], 4: [1]}
    slots: dict[int, int | None] = {1: 2, 2: 1, 3: 1, 4: None}
    store = TraceStore(tmp_path / "t.jsonl")
    source, kept, by_attempt = scripted("rejection", script, slots, store)
    assert kept == [1, 2]
    assert by_attempt == [1, 1, 2]
    assert [(job.task.key, job.attempt) for job in source.jobs] == [
        (1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2),
    ]  # fmt: skip
    assert [attempt.fault for attempt in store.attempts] == [
        "", NOT_FIRST, NOT_FIRST, "unparsed", NOT_FIRST, "", NOT_FIRST,
    ]  # fmt: skip
    assert all(job.note is None for job in source.jobs), "rejection hides the target"


def test_all_keeps_any_valid_trace_of_any_list(tmp_path: Path) -> None:
    script: dict[int, list[int | None]] = {1: [0], 2: [None, 2], 4: [1]}
    _, kept, _ = scripted("all", script, {1: 2, 2: 1, 4: None}, TraceStore(tmp_path / "t.jsonl"))
    assert kept == [1, 2, 4]


def test_targeted_tells_the_writer_alone(tmp_path: Path) -> None:
    script: dict[int, list[int | None]] = {1: [2], 2: [0, 1]}
    source, kept, _ = scripted("targeted", script, {1: 2, 2: 1}, TraceStore(tmp_path / "t.jsonl"))
    assert kept == [1, 2]
    assert {job.task.key: job.note for job in source.jobs} == {1: 2, 2: 1}


def test_no_trace_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none of 1 lists got a trace in 3 attempts, 3 .* 'unparsed'; raise"
    ) as caught:
        scripted("rejection", {1: [None] * 3}, {1: 0}, TraceStore(tmp_path / "t.jsonl"))
    assert "\n" not in str(caught.value)


def test_a_stopped_run_goes_on_and_leaves_the_same_file(tmp_path: Path) -> None:
    script: dict[int, list[int | None]] = {key: [0, 0, key % 3] for key in range(6)}
    given = [Problem(task(key=key), key % 3, "u", ("a", "b", "c")) for key in range(6)]
    collect_lessons(given, Script(script), whole := TraceStore(tmp_path / "whole.jsonl"), options(attempts=3))
    broken = tmp_path / "broken.jsonl"
    for stop in (4, 1):
        with pytest.raises(ConnectionError):
            collect_lessons(given, Script(script, stop), TraceStore(broken), options(attempts=3))
    source = Script(script)
    lessons, counts = collect_lessons(given, source, TraceStore(broken), options(attempts=3))
    assert broken.read_bytes() == whole.path.read_bytes()
    assert len(source.jobs) == counts.attempts - 5, "what was written is not asked for again"
    assert len(lessons) == 6
    again = Script({})
    assert len(collect_lessons(given, again, TraceStore(broken), options(attempts=3))[0]) == 6
    assert not again.jobs


def test_a_larger_budget_goes_on_where_the_smaller_ended(tmp_path: Path) -> None:
    script: dict[int, list[int | None]] = {1: [0, 1], 2: [1]}
    store = TraceStore(tmp_path / "t.jsonl")
    _, kept, _ = scripted("rejection", script, {1: 1, 2: 1}, store, attempts=1)
    assert kept == [2]
    source, kept, _ = scripted("rejection", script, {1: 1, 2: 1}, store, attempts=2)
    assert kept == [1, 2]
    assert [(job.task.key, job.attempt) for job in source.jobs] == [(1, 1)]
    _, kept, by_attempt = scripted("rejection", script, {1: 1, 2: 1}, store, attempts=1)
    assert (kept, by_attempt) == ([2], [1]), "a smaller budget sees no later attempt"


# the embedded reasoner
def test_kept_evidence_puts_the_target_first(tmp_path: Path) -> None:
    given = problems()
    store = TraceStore(tmp_path / "t.jsonl")
    lessons, counts = collect_lessons(given, evidence(options()), store, options())
    slots = {problem.task.key: problem.slot for problem in given}
    assert 0 < len(lessons) < counts.lists == 36
    assert all(first_slot(lesson.trace) == slots[lesson.task.key] for lesson in lessons)
    shares = [counts.within(budget) for budget in (1, 2, 3, 4)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_the_first_attempt_is_the_reasoners_own_and_all_mode_keeps_it(tmp_path: Path) -> None:
    given = problems()
    lessons, counts = collect_lessons(
        given, evidence(options("all")), TraceStore(tmp_path / "t"), options("all")
    )
    assert counts.attempts == len(lessons) == len(given)
    for lesson in lessons:
        assert lesson.trace == write_evidence_trace(lesson.task, reasoner(), template(), ITEMS)


def test_samples_follow_the_logit() -> None:
    """First items of sampled traces occur as often as the logit says (three standard errors of 4,000 draws)."""
    given = task(levels=[[1, 1], [2, 0], [0, 3]])
    source = evidence(options())
    jobs = [Job(given, attempt) for attempt in range(1, 4001)]
    firsts = np.bincount(
        [first_slot(draft.trace) for _, draft in source.write(jobs) if draft.trace], minlength=3
    )
    odds = np.exp(reasoner().utilities(given.levels))
    expected = odds / odds.sum()
    # scores are whole numbers and ties go to the retriever's order: points are a third of a unit of utility
    assert np.abs(firsts / 4000 - expected).max() < 0.09
    ranked = firsts.argsort()[::-1]
    assert ranked[0] == expected.argmax()


def test_sampled_traces_are_true_to_their_own_scores() -> None:
    given = task(levels=[[1, 1], [2, 0], [0, 3]])
    for _, draft in evidence(options()).write([Job(given, attempt) for attempt in range(30)]):
        assert draft.trace is not None
        scores = [int(score) for score in re.findall(r"=(-?\d+)", draft.trace.reasoning)]
        assert min(scores) >= 0
        assert scores[first_slot(draft.trace)] == max(scores)


def test_samples_depend_on_seed_list_and_attempt_alone() -> None:
    given = [task(key=key, levels=[[1, 1], [2, 0], [0, 3]]) for key in range(20)]
    jobs = [Job(one, attempt) for one in given for attempt in (1, 2)]

    def texts(seed: int, order: int) -> list[str]:
        written = evidence(options(seed=seed)).write(jobs[::order])
        return [draft.trace.text for _, draft in list(written)[::order] if draft.trace]

    assert texts(0, 1) == texts(0, -1)
    assert texts(0, 1) != texts(1, 1)


def test_targeted_evidence_needs_one_attempt(tmp_path: Path) -> None:
    given = problems()
    lessons, counts = collect_lessons(
        given, evidence(options("targeted")), TraceStore(tmp_path / "t"), options("targeted")
    )
    assert counts.attempts == counts.lists == len(lessons)


# nobody is told
@pytest.mark.parametrize("prompt", ["compact", "gr2", "own"])
@pytest.mark.parametrize("mode", ["rejection", "targeted"])
def test_a_lesson_does_not_know_the_target(tmp_path: Path, prompt: str, mode: Mode) -> None:
    """Prompts of lessons are those of the lists, whatever the target is, and no word of the note is kept."""
    words = named_template(prompt)
    tokenizer = train_tokenizer(["red lamp blue lamp rank:"] * 4, 300, [label(slot) for slot in range(3)])
    builder = PromptBuilder(words, WITH_SIDS, tokenizer, 10_000)
    seen = []
    for slot in range(3):
        given = [Problem(task(levels=[[1, 1], [2, 0], [0, 3]]), slot, "u", ("a", "b", "c"))]
        source = EvidenceSource(reasoner(), words, WITH_SIDS, options(mode, 64))
        assert (hint(slot) in source.prompt(given[0].task, slot)) and "note" in hint(slot)
        lessons, _ = collect_lessons(given, source, TraceStore(tmp_path / f"{slot}.jsonl"), options(mode, 64))
        (example,) = encode_lessons(lessons, builder, tokenizer, int(tokenizer.eos_token_id))
        (text,) = lesson_texts(lessons, words, WITH_SIDS)
        assert first_slot(lessons[0].trace) == slot
        assert "note" not in text
        assert text == "".join(render_prompt(words, WITH_SIDS, given[0].task, 99)) + lessons[0].trace.text
        seen.append(example.prompt_ids)
    assert seen[0] == seen[1] == seen[2]


def test_settings_tell_budgets_and_forms_apart() -> None:
    """Stored attempts are those of an equal budget of tokens and an equal form of traces."""
    source, given = Script({}), options()
    form = COMPACT.trace_form
    whole = settings_of(source, replace(given, max_tokens=64, form=form))
    assert whole != settings_of(source, replace(given, max_tokens=65, form=form))
    for name in ("pattern", "scores", "score", "strong", "cited_fact", "answer"):
        changed = replace(COMPACT, sections={**COMPACT.sections, name: Template("other")})
        assert changed.trace_form != form
    assert replace(COMPACT, places=("first",)).trace_form != form
    assert replace(COMPACT, sections={**COMPACT.sections, "system": Template("other")}).trace_form == form
    assert whole != settings_of(source, replace(given, max_tokens=64, form="other"))
