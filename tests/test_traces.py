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
from recbole_dgr2.data.prompt import label, render_prompt, slot_of_label
from recbole_dgr2.data.ranking import parse_ranking
from recbole_dgr2.data.traces import CITED, write_evidence_trace
from tests.reranking import GR2, ITEMS, NAMED, named_template, reasoner, task, template


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


@settings(max_examples=60)
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


@pytest.mark.parametrize("name", ["compact", "gr2"])
def test_shipped_traces_parse(name: str) -> None:
    shipped = named_template(name)
    for n in (1, 2, 3, 10):
        given_task = task(candidates=(1,) * n, levels=[[slot % 4, 0] for slot in range(n)])
        model = reasoner(n)
        ranking = parse_ranking(write_evidence_trace(given_task, model, shipped, NAMED).text, n, True)
        assert ranking.valid
        assert list(ranking.order) == model.order(given_task.levels, len(shipped.places)).tolist()


def test_the_gr2_trace_word_for_word() -> None:
    """Points 3 * match + 2 * popular + next: 5, 6 and 12; candidate 2 shares no category and goes with nothing."""
    given_task = task(history=(4, 1, 2), candidates=(3, 5, 1), levels=[[1, 0, 2], [0, 3, 0], [2, 2, 2]])
    found = write_evidence_trace(given_task, reasoner(3, 3), GR2, NAMED)
    assert found.reasoning == (
        "<think>\n"
        "Pattern: the user mostly chooses light, home.\n"
        "Category: <c1><c3> are of these categories. Complement: <c1><c3> go with items of the history.\n"
        "Comparison, points by facts: <c1> 5 <c2> 6 <c3> 12\n"
        "First is <c3> <a_1><b_1>, 12 points, retriever score 2, popularity 2, follows the last item 2\n"
        "Second is <c2> <a_2><b_5>, 6 points, popularity 3, retriever score 0, follows the last item 0\n"
        "Third is <c1> <a_0><b_3>, 5 points, retriever score 1, follows the last item 2, popularity 0\n"
    )
    assert found.answer == (
        '</think>\n\n{"explanation": "<c3> <a_1><b_1> comes first, retriever score 2, popularity 2, follows the last '
        'item 2", "recommendations": ["<c3>","<c2>","<c1>"]}'
    )


def test_no_candidate_fits_or_complements() -> None:
    given_task = task(history=(4,), candidates=(1, 2), levels=[[1, 1], [2, 0]])
    found = write_evidence_trace(given_task, reasoner(2), GR2, NAMED)
    assert "Category: none are of these categories. Complement: none go with" in found.reasoning


@pytest.mark.parametrize("name", ["own", "compact", "gr2"])
def test_a_trace_depends_on_what_the_prompt_shows_alone(name: str) -> None:
    """Two lists with one prompt, of different items and keys, have one trace."""
    words = named_template(name)
    twins = ItemText(
        titles=("", "a", "b", "c", "a", "b", "c"),
        categories=((), ("x",), ("y",), ("z",), ("x",), ("y",), ("z",)),
        brands=("", "k", "l", "m", "k", "l", "m"),
        sids={item: f"<a_{(item - 1) % 3}>" for item in range(1, 7)},
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
