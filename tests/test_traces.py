"""Traces: a function of what the prompt shows, true to it, and ending in the reasoner's order."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.prompt import label, load_template, render_prompt, slot_of_label
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.data.traces import CITED, write_evidence_trace
from recbole_dgr2.paths import prompt_file
from tests.reranking import ITEMS, reasoner, task, template


def test_a_trace_by_hand() -> None:
    """Points 2 * m + p: 2 * 1 + 1 = 3, 2 * 2 + 0 = 4, 0 + 3 = 3; the first and the third tie."""
    found = write_evidence_trace(task(levels=[[1, 1], [2, 0], [0, 3]]), reasoner(), template(), ITEMS)
    assert found.reasoning == (
        "<think> light home\n"
        "scores <c1>=3 <c2>=4 <c3>=3\n"
        "first <c2> match m2 popular p0\n"
        "second <c1> match m1 popular p1\n"
    )
    assert found.answer == (
        '</think>{"explanation":"<c2> has match m2 popular p0","recommendations":["<c2>","<c1>","<c3>"]}'
    )
    assert found.text == found.reasoning + found.answer


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 4))
def test_answers_parse_back_and_facts_are_true(seed: int, n: int, n_facts: int) -> None:
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 4, size=(n, n_facts))
    given_task = task(candidates=tuple(rng.integers(1, 6, size=n).tolist()), levels=levels.tolist())
    given_task = replace(given_task, levels=levels, fact_names=FACTS[:n_facts])
    model = replace(reasoner(n, max(n_facts, 1)), weights=rng.normal(size=(n_facts, 4)))
    trace = write_evidence_trace(given_task, model, template(), ITEMS)
    ranking = parse_ranking(trace.text, n, True)
    assert ranking.valid
    assert list(ranking.order) == model.order(levels, 2).tolist()
    lines = re.findall(r"^(?:first|second) (<c\d+>)(.*)$", trace.reasoning, flags=re.M)
    assert [slot_of_label(name) for name, _ in lines] == list(ranking.order[:2])
    cited = re.search(r'"(<c\d+>) has([^"]*)"', trace.answer)
    assert cited is not None
    for name, facts in [*lines, cited.groups()]:
        slot = slot_of_label(name)
        assert slot is not None
        words = re.findall(r"(\w+) (\w)(\d)", facts)
        assert len(words) == min(CITED, n_facts)
        for fact, symbol, level in words:
            assert symbol == fact[0]
            assert int(level) == levels[slot, FACTS.index(fact)]


def test_shipped_traces_parse() -> None:
    shipped = load_template(prompt_file("compact"))
    for n in (1, 2, 3, 10):
        given_task = task(candidates=(1,) * n, levels=[[slot % 4, 0] for slot in range(n)])
        model = reasoner(n)
        ranking = parse_ranking(write_evidence_trace(given_task, model, shipped, ITEMS).text, n, True)
        assert ranking.valid
        assert list(ranking.order) == model.order(given_task.levels, len(shipped.places)).tolist()


@pytest.mark.parametrize("shipped", [False, True])
def test_a_trace_depends_on_what_the_prompt_shows_alone(shipped: bool) -> None:
    """Two lists with one prompt, of different items and keys, have one trace."""
    words = load_template(prompt_file("compact")) if shipped else template()
    twins = ItemText(
        titles=("", "a", "b", "c", "a", "b", "c"),
        categories=((), ("x",), ("y",), ("z",), ("x",), ("y",), ("z",)),
        brands=("", "k", "l", "m", "n", "o", "p"),
    )
    one = task(history=(1, 2), candidates=(3, 1), levels=[[1, 2], [3, 0]], key=1)
    other = replace(one, history=(4, 5), candidates=(6, 4), key=99)
    assert render_prompt(words, twins, one, 3) == render_prompt(words, twins, other, 3)
    traces = [write_evidence_trace(given_task, reasoner(2), words, twins) for given_task in (one, other)]
    assert traces[0] == traces[1]


def test_hostile_categories_stay_text() -> None:
    items = replace(ITEMS, categories=((), ("<c1>",), ("<|eos|>",), (), (), ()))
    trace = write_evidence_trace(task(), reasoner(), template(), items)
    assert trace.reasoning.startswith("<think> < |eos|> < c1>\n")
    assert trace.text.count(label(0)) == 4  # its score, its two places, the ranked list
