"""Writers of traces: what they are shown, a model in memory, and options that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recbole_dgr2.data.rejection import Mode
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_reading import hint
from recbole_dgr2.pipeline.trace_sources import LocalSource, Showing, model_name
from recbole_dgr2.pipeline.views import trace_options
from tests.fake_server import ANSWER, KEY
from tests.reranking import COMPACT, GR2, ITEMS, task, template
from tests.tiny import tiny_backbone
from tests.trace_jobs import jobs, sampling


def test_a_system_text_and_a_note_go_where_they_belong() -> None:
    items = ITEMS.__class__(ITEMS.titles, ITEMS.categories, ITEMS.brands, {i: f"<a_{i}>" for i in range(6)})
    showing = Showing(GR2, items)
    system, user = showing.messages(task(), None)
    assert system == {"role": "system", "content": GR2.fill("system")}
    assert user["role"] == "user"
    assert GR2.fill("system") not in user["content"]
    told = showing.messages(task(), 1)[1]["content"]
    assert told == user["content"].replace(GR2.fill("closing"), hint(1) + GR2.fill("closing"))
    assert "note" not in user["content"]


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
