"""What was left out of prompts is in the report, as numbers and in words."""

from __future__ import annotations

import pytest

from recbole_dgr2.data.prompt import Prompt
from recbole_dgr2.report.tables import Row, RunInfo, build_report, render_markdown
from recbole_dgr2.report.trimming import count_trimmed, trimmed_line

PROMPTS = [Prompt((1,), ()), Prompt((1,), (), 3, 0), Prompt((1,), (), 1, 2), Prompt((1,), (), 0, 1)]
INFO = RunInfo("d", "r", 10, 4, 0, 1)


def test_counts_by_hand() -> None:
    entry = count_trimmed("test", PROMPTS)
    assert entry == {"phase": "test", "prompts": 4, "trimmed": 3, "history_items": 4, "candidate_titles": 3}
    assert count_trimmed("training", [])["prompts"] == 0


def test_in_words() -> None:
    line = trimmed_line([count_trimmed("training", PROMPTS[:1]), count_trimmed("test", PROMPTS)])
    assert line == (
        "Prompts trimmed to their budget: training 0 of 1; "
        "test 3 of 4 (4 history items dropped, 3 candidate titles cut)"
    )
    report = build_report(INFO, [Row("retriever")], {"trimmed": [count_trimmed("test", PROMPTS)]})
    assert report["trimmed"] == [count_trimmed("test", PROMPTS)]
    assert "Prompts trimmed to their budget: test 3 of 4 (" in render_markdown(report)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"trimmed": 5}, r"report.trimmed\[0\].trimmed is 5: at most prompts = 4 is possible"),
        ({"history_items": -1}, r"report.trimmed\[0\].history_items is -1: a whole number >= 0 is needed"),
        ({"prompt": 1}, r"report.trimmed\[0\] has the unknown key 'prompt': did you mean 'prompts'"),
    ],
)
def test_reports_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_report(INFO, [Row("retriever")], {"trimmed": [{**count_trimmed("test", PROMPTS), **change}]})
