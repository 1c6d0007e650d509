"""Free text read as a trace: brought into the template's form, or turned down for a stated fault."""

from __future__ import annotations

import json

import pytest

from recbole_dgr2.data.prompt import label
from recbole_dgr2.data.trace_reading import GARBLED, TOLD, UNCITED, UNFINISHED, read_trace
from recbole_dgr2.data.traces import Trace, write_evidence_trace
from tests.reranking import WITH_SIDS, named_template, reasoner, task


def read(
    text: str, n: int = 3, finished: bool = True, prompt: str = "compact", told: bool = False
) -> tuple[Trace | None, str]:
    return read_trace(text, n, finished, named_template(prompt), told)


@pytest.mark.parametrize("prompt", ["compact", "gr2", "own"])
def test_a_trace_in_the_templates_form_is_kept_as_it_is(prompt: str) -> None:
    words = named_template(prompt)
    given = task(levels=[[1, 1], [2, 0], [0, 3]])
    trace = write_evidence_trace(given, reasoner(), words, WITH_SIDS)
    assert read_trace(trace.text, 3, True, words) == (trace, "")


FREE = """<think>
The user likes lamps, so <c2> [blue] fits <|im_end|> best.
</think>
```json
{"explanation": "<c2> goes with <|x|> lamps", "score": 1, "recommendations": ["<c2>", "<c1>", "<c3>"]}
```
Hope this helps!"""


def test_free_text_gets_the_templates_form() -> None:
    trace, fault = read(FREE)
    assert not fault
    assert trace is not None
    assert trace.reasoning == "<think>The user likes lamps, so <c2> [ blue] fits < |im_end|> best.\n"
    assert trace.answer == (
        '</think>{"explanation":"<c2> goes with < |x|> lamps","recommendations":["<c2>","<c1>","<c3>"]}'
    )
    assert json.loads(trace.answer.removeprefix("</think>"))["recommendations"][0] == "<c2>"


def answer(*slots: int, explanation: str = "<c1> fits") -> str:
    return json.dumps({"explanation": explanation, "recommendations": [label(slot) for slot in slots]})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("no list at all", "unparsed"),
        ("why <c1>" + answer(0, 1), "omission"),
        ("why <c1>" + answer(0, 1, 1, 2), "duplicate"),
        ("why <c1>" + answer(0, 1, 2, 5), "out_of_set"),
        ("why" + answer(0, 1, 2, explanation="it fits"), UNCITED),
        ("why <c7>" + answer(0, 1, 2, explanation="it fits"), UNCITED),
        ("why \ud83d <c1>" + answer(0, 1, 2), GARBLED),
        ("why" + answer(0, 1, 2, explanation="<c1> \ud83d"), GARBLED),
        ("why" + answer(0, 1, 2, explanation="<c1> \U0001f600"), ""),
        ("why <a_1><b_2>" + answer(0, 1, 2, explanation=""), ""),
        ("why" + answer(0, 1, 2), ""),
    ],
)
def test_what_is_turned_down(text: str, fault: str) -> None:
    trace, found = read(text)
    assert found == fault
    assert (trace is None) == bool(fault)


@pytest.mark.parametrize(
    "words",
    [
        "the private  note says",
        "According to the NOTE, the user will take",
        "the user goes on to choose",
        "The hint tells me it is",
        "as hinted,",
        "I was told of",
        "the instructions name",
        "the target is",
        "the target item is",
    ],
)
def test_a_writer_that_was_told_must_not_say_so(words: str) -> None:
    for text in (f"{words} <c1>{answer(0, 1, 2)}", answer(0, 1, 2, explanation=f"{words} <c1>")):
        assert read(text, told=True) == (None, TOLD)
        assert not read(text)[1], "where nobody was told, words are words"
    assert not read("why, from <c1> noted targets" + answer(0, 1, 2), told=True)[1]


def test_an_answer_that_was_cut_off_is_turned_down() -> None:
    assert read(FREE, finished=False) == (None, UNFINISHED)
