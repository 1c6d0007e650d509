"""From the free text of a language model to a trace that can be learned, or to the reason why it cannot.

A text is reasoning and then a JSON object with the ranked list. What is kept has one form, whoever wrote it: thinking
tags and code fences go, the reasoning and the JSON object are framed as the template frames them, and no word of the
text can be taken for a special token.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from recbole_dgr2.data.prompt import label, plain, slot_of_label
from recbole_dgr2.data.ranking import last_object, parse_ranking
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.traces import Trace

IDENTIFIER = re.compile(r"<c[1-9][0-9]*>|<a_[0-9]+>(?:<[b-z]_[0-9]+>)*|<[b-z]_[0-9]+>")
"""Names of a candidate in a text: its label, or its semantic ID."""

HINT = "Private note for the writer, never to be mentioned: the user goes on to choose $label.\n"
"""Shown to the writer of a targeted trace, and to nobody else; a trace with words of _TOLD is turned down."""

UNFINISHED, UNCITED, TOLD, GARBLED = (
    "unfinished",
    "cites no candidate",
    "speaks of the note",
    "no valid Unicode",
)

_TOLD = re.compile(
    r"\b(?:notes?|hint(?:s|ed)?|told|instruct\w*)\b|never\s+to\s+be\s+mentioned|goes\s+on\s+to\s+choose"
    r"|\btarget\s+(?:item\s+|candidate\s+)?is\b",
    re.IGNORECASE,
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a character: JSON can escape it, no file can hold it."""
_TAGS = re.compile(r"</?think>")
_OPENING = re.compile(r"\s*<think>\s*")
_COLON, _COMMA = re.compile(r'^\s*"explanation":(\s*)'), re.compile(r',(\s*)"recommendations"')
_FENCE = re.compile(r"```[a-z]*\s*$")


def hint(slot: int) -> str:
    """The note that names the target, the candidate in 0-based `slot`."""
    return HINT.replace("$label", label(slot))


def read_trace(
    text: str, n: int, finished: bool, template: PromptTemplate, told: bool = False
) -> tuple[Trace | None, str]:
    """The trace in a raw response to a list of `n` candidates, or None and why there is none.

    Args:
        text: the response; the last JSON object in it is the answer, what comes after it is dropped.
        n: number of candidates.
        finished: whether the writer ended its response within its budget of tokens.
        template: of the prompt that the trace answers.
        told: whether the writer was shown the note, so that words that may speak of it are a fault.

    The reasons are the failures of `parse_ranking`, UNFINISHED, UNCITED, TOLD and GARBLED.
    """
    if not finished:
        return None, UNFINISHED
    ranking = parse_ranking(text, n, finished)
    if not ranking.valid:
        return None, ranking.failures[0]
    start, _, answer = last_object(text)
    explanation = str(answer.get("explanation", ""))
    body = _FENCE.sub("", _TAGS.sub("", text[:start]).strip()).strip()
    cited = map(slot_of_label, IDENTIFIER.findall(body + explanation))
    if not any(slot is None or slot < n for slot in cited):  # None: a semantic ID
        return None, UNCITED
    if _SURROGATE.search(body + explanation):
        return None, GARBLED
    if told and _TOLD.search(f"{body} {explanation}"):
        return None, TOLD
    ranking_text = ",".join(f'"{label(slot)}"' for slot in ranking.order)
    form = _form_of(template)
    kept = form.answer(json.dumps(_harmless(explanation), ensure_ascii=False), ranking_text)
    return Trace(f"{form.opening}{_harmless(body)}\n", kept), ""


@dataclass(frozen=True)
class _Form:
    """How a template writes what frames a trace: before the reasoning, before the JSON object, and after a colon and a
    comma in it."""

    opening: str
    lead: str
    colon: str
    comma: str

    def answer(self, explanation: str, ranking: str) -> str:
        return (
            f'{self.lead}{{"explanation":{self.colon}{explanation},{self.comma}'
            f'"recommendations":{self.colon}[{ranking}]}}'
        )


def _form_of(template: PromptTemplate) -> _Form:
    opening = _OPENING.match(template.sections["pattern"].template)
    lead, _, answer = template.sections["answer"].template.replace("$$", "$").partition("{")
    colon, comma = _COLON.search(answer), _COMMA.search(answer)
    return _Form(
        opening.group() if opening else "", lead, colon[1] if colon else "", comma[1] if comma else ""
    )


def _harmless(text: str) -> str:
    """`text` in which identifiers alone are still written as tokenizers look for special tokens."""
    pieces, end = [], 0
    for match in IDENTIFIER.finditer(text):
        pieces += [plain(text[end : match.start()]), match.group()]
        end = match.end()
    return "".join((*pieces, plain(text[end:])))
