"""Templates that are checked, prompts that keep every candidate, and titles that are only text."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import (
    LISTS,
    NUMBERS,
    SECTIONS,
    PromptBuilder,
    history_kinds,
    label,
    load_template,
    plain,
    render_prompt,
    slot_of_label,
)
from recbole_dgr2.model.backbone import train_tokenizer
from recbole_dgr2.paths import prompt_file, properties_dir
from tests.reranking import ITEMS, TEXTS, task, template

LABELS = [label(slot) for slot in range(5)]
SHIPPED = sorted((properties_dir() / "prompt").glob("*.yaml"))
CORPUS = ["taste light\n- red lamp\n<c1> blue lamp m2 p1\nrank:"] * 4


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CORPUS, 300, LABELS)


def builder(items: ItemText = ITEMS, max_tokens: int = 10_000, **options: Any) -> PromptBuilder:
    return PromptBuilder(template(**options), items, tokenizer(), max_tokens)


def decoded(ids: tuple[int, ...]) -> str:
    return str(tokenizer().decode(list(ids)))


def titled(*titles: str) -> ItemText:
    """Items with these titles, from item 1 on, that are of the kind <c1>."""
    return ItemText(("", *titles), ((), *((title,) for title in titles)), ("", *titles))


# templates
def write(tmp_path: Path, drop: str = "", **values: Any) -> Path:
    texts = {name: TEXTS.get(name, "") for name in SECTIONS}
    content: dict[str, Any] = {
        **texts,
        "places": ["first"],
        "drill_places": ["second"],
        "history_items": 2,
        "title_words": 4,
        **values,
    }
    content.pop(drop, None)
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_prompt_loads_and_is_whole(path: Path) -> None:
    shipped = load_template(path)
    assert prompt_file(path.stem) == path
    texts = render_prompt(shipped, ITEMS, task(), shipped.history_items)
    assert len(texts) == 5
    for slot, text in enumerate(texts[1:-1]):
        assert label(slot) in text


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = load_template(prompt_file(str(write(tmp_path, closing="cost: $$5"))))
    assert own.fill("closing") == "cost: $5"
    assert own.places == ("first",)
    assert own.render_fact("cited_fact", "match", 3) == " match m3"
    assert set(own.sections) == set(SECTIONS)


@pytest.mark.parametrize("name", [*SECTIONS, *LISTS, *NUMBERS])
def test_a_missing_section(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"own.yaml: section '{name}' is missing"):
        load_template(write(tmp_path, drop=name))


@pytest.mark.parametrize(
    "values,message",
    [
        (
            {"opening": "$histori"},
            r"section 'opening' uses \$histori; its placeholders are \$kinds, \$history",
        ),
        ({"closing": "${label}"}, r"section 'closing' uses \$label; its placeholders are none"),
        ({"opening": "5 $ or"}, r"section 'opening' has a \$ that begins no placeholder; write \$\$"),
        ({"candidate": "$title"}, r"section 'candidate' must use \$label"),
        ({"answer": "{}"}, r"section 'answer' must use \$ranking"),
        ({"opening": None}, "section 'opening' is None; expected text in quotes"),
        ({"opning": "x"}, "unknown section 'opning'; did you mean 'opening'"),
        ({"history_items": -1}, "history_items is -1; expected a whole number of at least 0"),
        ({"title_words": "4"}, "title_words is '4'; expected a whole number"),
        ({"places": "first"}, "places is 'first'; expected a list of words"),
        ({"places": []}, "places is empty; expected a word for each candidate to promote"),
    ],
)
def test_bad_templates(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_template(write(tmp_path, **values))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    for text, message in (
        ("- a\n- b\n", "expected sections"),
        ("a: [", "not valid YAML"),
        ("", "expected sections"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            load_template(tmp_path / "bad.yaml")
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"prompt 'compat': no file .*; did you mean compact"):
        load_template(prompt_file("compat"))
    with pytest.raises(FileNotFoundError, match=r"no file .*none/x\.yaml$"):
        load_template(tmp_path / "none" / "x.yaml")


# labels
def test_labels() -> None:
    assert [slot_of_label(label(slot)) for slot in range(100)] == list(range(100))
    for text in ("c1", "<c0>", "<c01>", "<c1", "<c1> ", "<C1>", "<c-1>", "", "<c" + "9" * 5000 + ">"):
        assert slot_of_label(text) is None


def test_labels_are_single_tokens_in_the_prompt() -> None:
    prompt = builder().build(task())
    for slot, (start, end) in enumerate(prompt.candidate_spans):
        assert prompt.token_ids[start] == tokenizer().convert_tokens_to_ids(label(slot))
        assert decoded(prompt.token_ids[start:end]).startswith(label(slot))


# prompts
def test_a_prompt_by_hand() -> None:
    shown = task(history=(4, 1, 2), candidates=(3, 5), levels=[[1, 0], [0, 3]])
    prompt = builder(history_items=2, title_words=1).build(shown)
    text = "taste light home\n- red\n- blue\n<c1> blue m1 p0\n<c2> unknown m0 p3\nrank:"
    assert decoded(prompt.token_ids) == text
    spans = [decoded(prompt.token_ids[start:end]) for start, end in prompt.candidate_spans]
    assert spans == ["<c1> blue m1 p0\n", "<c2> unknown m0 p3\n"]


def test_fewer_history_items_than_asked_for() -> None:
    for history in ((), (1,), (1, 2), (1, 2, 4), (4, 1, 2, 4)):
        text = "".join(render_prompt(template(), ITEMS, task(history=history), 3))
        assert text.count("- ") == min(len(history), 3)
        assert decoded(builder().build(task(history=history)).token_ids) == text


def test_too_long_prompts_lose_their_oldest_history_first() -> None:
    long = task(history=(1, 2, 4), candidates=(3, 5, 2))
    whole = builder(history_items=3).build(long)
    seen = []
    for limit in range(len(whole.token_ids), 0, -1):
        try:
            prompt = builder(history_items=3, max_tokens=limit).build(long)
        except ValueError as error:
            assert str(error).startswith(f"list {long.key}: the prompt has ")
            assert f"leaves {limit}; lower n_candidates" in str(error)
            break
        assert len(prompt.token_ids) <= limit
        text = decoded(prompt.token_ids)
        seen.append(text.count("- "))
        expected = "".join(f"- {ITEMS.titles[item]}\n" for item in (1, 2, 4)[3 - seen[-1] :])
        assert text.startswith(f"taste light seat\n{expected}<c1>")
        for slot, (start, end) in enumerate(prompt.candidate_spans):
            assert decoded(prompt.token_ids[start:end]).startswith(label(slot))
        assert len(prompt.candidate_spans) == 3
    assert list(dict.fromkeys(seen)) == [3, 2, 1, 0]


def test_kinds_are_the_frequent_ones_of_recent_items() -> None:
    assert history_kinds(ITEMS, (1, 2, 4)) == ["light", "seat"]
    assert history_kinds(ITEMS, (4, 2)) == ["light", "seat"]  # a tie: the newer first
    assert history_kinds(ITEMS, (2, 4)) == ["seat", "light"]
    assert history_kinds(ITEMS, (4, *[2] * 10)) == ["light"]
    assert history_kinds(ITEMS, ()) == history_kinds(ITEMS, (5,)) == ["unknown"]


# titles are only text
TOKENS = ["<c1>", "<c3>", "<|eos|>", "<|pad|>", "</s>", "[SEP]"]


@pytest.mark.parametrize("token", TOKENS)
def test_text_of_a_title_never_becomes_a_token_of_that_name(token: str) -> None:
    hostile = builder(
        titled(f"a {token}{token} b", f"x{token}", token), candidate="$label $title $kinds$facts\n"
    )
    harmless = builder(titled("a b", "x", "c"), candidate="$label $title $kinds$facts\n")
    special = [*map(tokenizer().convert_tokens_to_ids, LABELS), 0, 1]

    def found(build: PromptBuilder) -> list[int]:
        prompt = build.build(task(history=(1, 2, 3), candidates=(3, 1)))
        return [token for token in prompt.token_ids if token in special]

    assert found(hostile) == found(harmless) == [special[0], special[1]]


@settings(deadline=None)
@given(st.text(), st.sampled_from(TOKENS))
def test_plain_text_holds_no_token_and_loses_nothing(text: str, token: str) -> None:
    shown = plain(text + token + text)
    assert token not in shown
    assert shown.replace(" ", "") == (text + token + text).replace(" ", "")
    assert plain(shown) == shown


def test_ordinary_brackets_stay_readable() -> None:
    assert plain("Toy Story (1995) > Heat") == "Toy Story (1995) > Heat"
    assert plain("a < b [ c ]") == "a < b [ c ]"


def test_a_dollar_in_a_title_is_only_text() -> None:
    items = replace(ITEMS, titles=("", "$kinds $$ ${x}", "b", "c", "d", ""))
    text = "".join(render_prompt(template(), items, task(candidates=(1,)), 3))
    assert "<c1> $kinds $$ ${x} m0" in text
