"""Faithfulness: true traces score 1, each kind of lie shows in its own measure, and babble is no crash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2.data.evidence import FACTS
from recbole_dgr2.data.prompt import render_prompt
from recbole_dgr2.data.statements import Claim, StatementReader
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.traces import write_evidence_trace
from recbole_dgr2.report import tables
from recbole_dgr2.report.faithfulness import MEASURES, Case, judge, measure_faithfulness
from recbole_dgr2.report.schema import check_report
from tests.reranking import WITH_SIDS, named_template, reasoner, task
from tests.test_tables import info, rows
from tests.toy_run import Finished

NAMES = ("compact", "gr2", "own")
LEVELS = [[1, 1], [2, 0], [0, 3]]


def case(text: str, name: str = "compact", given: RankingTask | None = None) -> Case:
    shown = given or task(levels=LEVELS)
    return Case(shown, "".join(render_prompt(named_template(name), WITH_SIDS, shown, 9)), text)


def true_text(name: str = "compact", given: RankingTask | None = None, n: int = 3, n_facts: int = 2) -> str:
    shown = given or task(levels=LEVELS)
    return write_evidence_trace(shown, reasoner(n, n_facts), named_template(name), WITH_SIDS).text


def measures(text: str, name: str = "compact") -> dict[str, float]:
    return judge(case(text, name), StatementReader(named_template(name)))


@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
def test_the_reasoners_traces_are_faithful(name: str, seed: int, n: int, n_facts: int) -> None:
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 4, size=(n, n_facts))
    given = task(candidates=tuple(rng.integers(1, 6, size=n).tolist()), levels=levels.tolist())
    given = replace(given, levels=levels, fact_names=FACTS[:n_facts])
    text = true_text(name, given, n, n_facts)
    found = judge(case(text, name, given), StatementReader(named_template(name)))
    assert {key: found[key] for key in MEASURES[:4]} == dict.fromkeys(MEASURES[:4], 1.0)
    assert found["repeated_lines"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_a_trace_says_by_hand(name: str) -> None:
    """Scores 3, 4, 3: the second leads, the first and the third tie and stay in the retriever's order."""
    said = StatementReader(named_template(name)).read(true_text(name))
    places = len(named_template(name).places)
    assert {(0, 3), (1, 4), (2, 3)} == set(said.scores)
    assert said.promoted == ((0, 1), (1, 0), (2, 2))[:places]
    assert said.praised == 1
    leader = (Claim(1, "match", 2), Claim(1, "popular", 0))
    assert said.claims[:2] == leader
    assert said.claims[-2:] == leader
    assert len(said.claims) == 2 * (places + 1)


def fact(name: str, of: str, level: int) -> str:
    return named_template(name).render_fact("cited_fact", of, level)


def other_second(text: str) -> str:
    """The line of gr2's second place names the third candidate."""
    place = named_template("gr2").places[1]
    lines = [line.replace("<c1>", "<c3>") if line.startswith(place) else line for line in text.split("\n")]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("compact", "m2", "m3", {"facts_true": 3 / 4, "consistent": 0.0}),
        ("compact", "match m2", "match p2", {"facts_true": 3 / 4}),
        ("compact", "match m2", "brand b2", {"facts_true": 3 / 4}),
        ("compact", '"<c2> leads', '"<c1> leads', {"facts_true": 2 / 4, "praise_first": 0.0}),
        ("compact", "<c3> 3", "<c9> 3", {"ids_exist": 4 / 5}),
        ("compact", "best has score 4", "best has score 5", {"consistent": 0.0}),
        (
            "gr2",
            fact("gr2", "match", 2),
            fact("gr2", "match", 1),
            {"facts_true": 7 / 8, "consistent": 0.0},
        ),
        ("gr2", fact("gr2", "popular", 1), fact("gr2", "brand", 1), {"facts_true": 7 / 8}),
    ],
)
def test_each_lie_shows_in_its_measure(name: str, old: str, new: str, changed: dict[str, float]) -> None:
    text = true_text(name)
    assert old in text
    honest, lying = measures(text, name), measures(text.replace(old, new, 1), name)
    for key in MEASURES[:4]:
        assert lying[key] == pytest.approx(changed.get(key, honest[key])), key


def test_a_semantic_id_of_nothing_in_the_prompt() -> None:
    text = true_text("gr2")
    cited = len(StatementReader(named_template("gr2")).read(text).cited)
    found = measures(text.replace("<a_4>", "<a_7>", 1), "gr2")
    assert found["ids_exist"] == pytest.approx((cited - 1) / cited)


def test_a_semantic_id_of_another_candidate() -> None:
    """<a_3> is the first candidate's, and the text names it together with the second's label."""
    text = true_text("gr2")
    cited = len(StatementReader(named_template("gr2")).read(text).cited)
    found = measures(text.replace("<c2> <a_4>", "<c2> <a_3>", 1), "gr2")
    assert found["ids_exist"] == pytest.approx((cited - 1) / cited)


def test_a_later_place_that_disagrees() -> None:
    found = measures(other_second(true_text("gr2")), "gr2")
    assert found["facts_true"] < 1
    assert (found["consistent"], found["praise_first"]) == (0.0, 1.0)


def test_the_place_discussed_against_the_ranked_list() -> None:
    text = true_text().replace('["<c2>","<c1>"', '["<c1>","<c2>"')
    found = measures(text)
    assert (found["praise_first"], found["consistent"]) == (0.0, 0.0)
    assert found["facts_true"] == 1.0


def test_repetition_by_hand() -> None:
    """Words 1 2 3 4 1 2 3 4 1: runs 1234 2341 3412 4123 1234 2341, two of six again; of three lines one again."""
    assert measures("1 2 3 4 1 2 3 4 1")["repeated_words"] == pytest.approx(2 / 6)
    assert measures("a b\nc d\n a b \n\n")["repeated_lines"] == pytest.approx(1 / 3)
    looping = true_text().replace("</think>", "best has score 4<c2>: match m2 popular p0\n" * 20 + "</think>")
    assert measures(looping)["repeated_lines"] >= 0.8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "no idea",
        "<c1>" * 500,
        "{" * 3000,
        '{"explanation": 5, "recommendations": ["<c1>"]}',
        "\0<c0>",
    ],
)
def test_babble_is_measured_as_far_as_it_says_anything(name: str, text: str) -> None:
    found = measures(text, name)
    assert all(0 <= value <= 1 for value in found.values())
    assert "facts_true" not in found
    assert "praise_first" not in found


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.integers(0, 300), st.text(max_size=30))
def test_broken_traces_are_no_crash(name: str, cut: int, noise: str) -> None:
    text = true_text(name)
    for broken in (text[:cut], text[:cut] + noise + text[cut:], noise + text[cut:]):
        assert all(0 <= value <= 1 for value in measures(broken, name).values())


def test_means_are_over_the_answers_that_say_something() -> None:
    lie = true_text().replace("m2", "m3")
    cases = [case(true_text()), case(lie), case("no idea"), case("")]
    found = measure_faithfulness(cases, named_template("compact"), 200, 0)
    assert found["facts_true"].answers == 2
    assert found["facts_true"].value == pytest.approx(0.75)
    assert found["facts_true"].ci95 == (0.5, 1.0)
    assert found["repeated_lines"].answers == 3
    assert measure_faithfulness([], named_template("compact"), 200, 0) == {}
    assert list(found) == [name for name in MEASURES if name in found]


def report() -> dict[str, Any]:
    found = measure_faithfulness([case(true_text()), case("no idea")], named_template("compact"), 200, 0)
    return tables.build_report(info(), [replace(row, faithfulness=found) for row in rows()[:1]] + rows()[1:])


def test_the_report_shows_it() -> None:
    whole = report()
    block = next(row for row in whole["rows"] if row["name"] == "conversion")["faithfulness"]
    assert block["facts_true"] == {"value": 1.0, "ci95": [1.0, 1.0], "answers": 1}
    assert next(row for row in whole["rows"] if row["name"] == "ar_teacher")["faithfulness"] == {}
    shown = tables.render_markdown(whole).partition("Faithfulness of the reasoning")[2]
    header = next(line for line in shown.splitlines() if line.startswith("|"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["model", *MEASURES]
    assert "| conversion" in shown
    assert "| ar_teacher" not in shown.partition("Seconds")[0]
    assert "Faithfulness" not in tables.render_markdown(tables.build_report(info(), rows()))


def test_a_run_measures_its_language_models(finished: Finished) -> None:
    found = {row["name"]: row["faithfulness"] for row in finished.report["rows"]}
    assert found["retriever"] == {}
    for name in ("ar_teacher", "naive", "conversion"):
        assert {"repeated_words", "repeated_lines"} <= set(found[name]) <= set(MEASURES), name


def test_reports_of_before_are_still_whole() -> None:
    old = tables.build_report(info(), rows())
    for row in old["rows"]:
        del row["faithfulness"]
    check_report(old)
    tables.render_markdown(old)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"truth": {"value": 1.0, "ci95": [1.0, 1.0], "answers": 1}}, "unknown key 'truth'"),
        ({"facts_true": {"value": 1.0, "ci95": [1.0, 1.0]}}, "lacks 'answers'"),
        ({"facts_true": {"value": 1.0, "ci95": [1.0, 1.0], "answers": 0}}, "whole number >= 1"),
        ({"facts_true": {"value": 1.2, "ci95": [1.0, 1.3], "answers": 1}}, "two ends around the value 1.2"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(entry: dict[str, Any], reason: str) -> None:
    whole = report()
    whole["rows"][0]["faithfulness"] = entry
    with pytest.raises(ValueError, match=reason):
        check_report(whole)
