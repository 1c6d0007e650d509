"""Templates: read with every mistake named, shipped ones whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.prompt import label, render_prompt
from recbole_dgr2.data.template import LISTS, NUMBERS, OPTIONAL, SECTIONS, SETTINGS, load_template
from recbole_dgr2.system.paths import prompt_file, properties_dir
from tests.chat import SIDS
from tests.reranking import ITEMS, TEXTS, task, template

SHIPPED = sorted((properties_dir() / "prompt").glob("*.yaml"))
WORDS = {fact: f"the {fact}" for fact in FACTS}


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
    assert shipped.name == path.stem
    texts = render_prompt(shipped, replace(ITEMS, sids=SIDS), task(), shipped.history_items)
    assert len(texts) == 5
    for slot, text in enumerate(texts[1:-1]):
        assert label(slot) in text


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = load_template(prompt_file(str(write(tmp_path, closing="cost: $$5"))))
    assert own.fill("closing") == "cost: $5"
    assert own.places == ("first",)
    assert own.render_fact("cited_fact", "match", 3) == " match m3"
    assert set(own.sections) == set(SECTIONS)


def test_what_may_be_left_out(tmp_path: Path) -> None:
    bare = load_template(write(tmp_path))
    assert (bare.chat, bare.separator, bare.fact_words) == (False, " ", {})
    assert {name: bare.sections[name].template for name in OPTIONAL} == {"system": "", "category": ""}
    assert bare.render_fact("cited_fact", "match", 3) == " match m3"
    full = load_template(
        write(tmp_path, chat=True, separator=", ", fact_words=WORDS, cited_fact="$words $level")
    )
    assert (full.chat, full.separator) == (True, ", ")
    assert full.render_fact("cited_fact", "match", 3) == "the match 3"
    assert set(SETTINGS) == {"chat", "separator", "fact_words"}


@pytest.mark.parametrize("section", ["history_item", "candidate", "strong", "answer"])
def test_a_template_knows_whether_it_shows_semantic_ids(section: str) -> None:
    assert not template().shows_sids
    for text, shown in (("$$sid", False), ("$sid", True), ("${sid}", True)):
        sections: Any = {section: f"{text} {TEXTS[section]}"}
        assert template(**sections).shows_sids == shown


def test_a_template_knows_whether_its_trace_thinks() -> None:
    assert template(pattern="<think>\n").thinks
    assert template(pattern="\n<think>$kinds").thinks
    assert not template(pattern="kinds: $kinds <think>").thinks


@pytest.mark.parametrize("name", [name for name in (*SECTIONS, *LISTS, *NUMBERS) if name not in OPTIONAL])
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
        ({"history_items": True}, "history_items is True; expected a whole number"),
        ({"chat": "yes please"}, "chat is 'yes please'; expected true or false"),
        ({"separator": 3}, "separator is 3; expected text in quotes"),
        ({"system": "$label"}, r"section 'system' uses \$label; its placeholders are none"),
        ({"opening": "$history$history"}, r"section 'opening' uses \$history 2 times; expected once"),
        ({"fact_words": "x"}, "fact_words is 'x'; expected words for each of match, popular"),
        ({"fact_words": {**WORDS, "match": 3}}, "fact_words is .*; expected words for each"),
        ({"fact_words": {"match": "x"}}, "fact_words lacks '[a-z]+'; expected words for each of match"),
        ({"fact_words": {**WORDS, "bran": "x"}}, "fact_words has an unknown 'bran'"),
        ({"chatt": True}, "unknown section 'chatt'; did you mean 'chat'"),
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
