"""Prompts: a template filled for one user's list of candidates, as text and as token ids within a budget.

Candidates are named by labels `<c1>` .. `<cN>` in the retriever's order; every tokenizer gets them as single tokens, so
an answer is one token a candidate. Each line of a prompt is tokenised apart, so its tokens do not depend on the lines
around it and the spans of the candidates are exact.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from recbole_dgr2.data.chat import end_of_turn, frame_of
from recbole_dgr2.data.item_text import UNKNOWN, ItemText
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.data.template import PromptTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LABEL = re.compile(r"<c([1-9][0-9]{0,5})>")
_OPENING_BRACKET = re.compile(r"([<\[])(?=\S)")
_HISTORY = "\0"
"""Stands for the history while the opening is filled."""
_KEPT_LINES = 2**16
"""Lines whose tokens are remembered: items come back in many prompts, and prompts in every stage."""

Tokens = tuple[int, ...]


def label(slot: int) -> str:
    """Name of the candidate in 0-based `slot`."""
    return f"<c{slot + 1}>"


def slot_of_label(text: str) -> int | None:
    """0-based slot that `text` names, None where it is no label."""
    match = _LABEL.fullmatch(text)
    return int(match.group(1)) - 1 if match else None


def plain(text: str) -> str:
    """Data-set text that no tokenizer can take for a label, a semantic ID or a special token.

    Such tokens are written in brackets without a space after the first (`<c3>`, `<|eos|>`, `[SEP]`), and tokenizers
    find them in any text, in a title as well. A space goes after every opening bracket of that kind.
    """
    return _OPENING_BRACKET.sub(r"\1 ", text)


@dataclass(frozen=True)
class TokenLimits:
    """Most tokens of a candidate's line and of the listed history; None: no limit of their own."""

    candidate: int | None = None
    history: int | None = None


NO_LIMITS = TokenLimits()


@dataclass(frozen=True)
class Prompt:
    """Token ids, the half-open token span [start, end) of every candidate's line, and what was left out to fit.

    dropped_history: history items that the template lists and the budget does not allow. cut_candidates: candidates
    whose title was shortened for the budget.
    """

    token_ids: Tokens
    candidate_spans: tuple[tuple[int, int], ...]
    dropped_history: int = 0
    cut_candidates: int = 0


class PromptBuilder:
    """Turns ranking tasks into prompts with one template, one tokenizer and the items' text."""

    def __init__(
        self,
        template: PromptTemplate,
        item_text: ItemText,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        limits: TokenLimits = NO_LIMITS,
    ) -> None:
        """`max_tokens` is the longest prompt that leaves room for a response; `limits` are those of its parts.

        Raises:
            ValueError: the template shows semantic IDs and there are none, or the tokenizer's chat template does not
                fit it, or ends a turn with another token than its EOS (see `end_with_turn`).
        """
        require_sids(template, item_text.sids is not None)
        end = end_of_turn(template, tokenizer)
        if end != tokenizer.eos_token_id:
            raise ValueError(
                f"prompt {template.name!r}: a turn ends with {tokenizer.convert_ids_to_tokens(end)!r}, but the "
                f"tokenizer's EOS is {tokenizer.eos_token!r}; set eos_token in the backbone's folder to the former"
            )
        self.template = template
        self.item_text = item_text
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.limits = limits
        self._ids = lru_cache(maxsize=_KEPT_LINES)(self._encode)
        frame = frame_of(template, tokenizer)
        self._head = self._ids(frame.head)
        self._closing = self._ids(template.fill("closing") + frame.tail)

    def build(self, task: RankingTask) -> Prompt:
        """The prompt of one task. Too long a prompt loses its oldest history items first, never a candidate.

        Raises:
            ValueError: the candidates alone do not fit, or a candidate's label, semantic ID and facts alone; what to
                change is named.
        """
        before, history, after = _opening(self.template, self.item_text, task)
        opening = (*self._head, *self._ids(before)), self._ids(after)
        lines = [self._candidate_line(task, slot) for slot in range(len(task.candidates))]
        rest = [ids for ids, _ in lines]
        room = self.max_tokens - sum(map(len, (*opening, *rest, self._closing)))
        if room < 0:
            raise ValueError(
                f"list {task.key}: the prompt has {self.max_tokens - room} tokens without any history, the model's "
                f"limit less max_new_tokens and block_size leaves {self.max_tokens}; lower one of the two or "
                "n_candidates, set candidate_tokens, or raise embedded_max_positions where that is the limit"
            )
        shown = self._newest(history, room)
        start = sum(map(len, (*opening, *shown)))
        spans = []
        for ids in rest:
            spans.append((start, start + len(ids)))
            start += len(ids)
        pieces = (opening[0], *shown, opening[1], *rest, self._closing)
        return Prompt(
            token_ids=tuple(token for piece in pieces for token in piece),
            candidate_spans=tuple(spans),
            dropped_history=len(history) - len(shown),
            cut_candidates=sum(cut for _, cut in lines),
        )

    def _newest(self, history: Sequence[int], room: int) -> list[Tokens]:
        """Lines of the newest of the items that fit, oldest first: an item is only shown with all newer ones."""
        if self.limits.history is not None:
            room = min(room, self.limits.history)
        lines: list[Tokens] = []
        for item in reversed(history):
            line = self._ids(_history_item(self.template, self.item_text, item))
            room -= len(line)
            if room < 0:
                break
            lines.insert(0, line)
        return lines

    def _candidate_line(self, task: RankingTask, slot: int) -> tuple[Tokens, bool]:
        """A candidate's line with as few words cut as its limit asks for, and whether any was."""

        def line(cut: int) -> Tokens:
            return self._ids(_candidate(self.template, self.item_text, task, slot, cut))

        whole, limit = line(0), self.limits.candidate
        if limit is None or len(whole) <= limit:
            return whole, False
        cuts = range(1, _cuttable(self.template, self.item_text, task.candidates[slot]) + 1)
        place = bisect_left(cuts, True, key=lambda cut: len(line(cut)) <= limit)
        if place == len(cuts):
            least = len(line(len(cuts)))
            raise ValueError(
                f"candidate_tokens is {limit}: label, semantic ID and facts of a candidate have {least} tokens alone; "
                f"expected at least {least}"
            )
        return line(cuts[place]), True

    def _encode(self, text: str) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def require_sids(template: PromptTemplate, there: bool) -> None:
    """Raise ValueError where a template shows semantic IDs and items have none (`there`: whether they have)."""
    if template.shows_sids and not there:
        raise ValueError(
            f"prompt {template.name!r} uses $sid, but there are no semantic IDs; set semantic_ids, or use a prompt "
            "without $sid, such as compact"
        )


def render_prompt(template: PromptTemplate, item_text: ItemText, task: RankingTask, listed: int) -> list[str]:
    """Texts of the opening, of each candidate, and of the closing, in the plain form; no budget cuts anything.

    Of the history items that the template lists, the newest `listed` are shown.
    """
    frame = frame_of(template, None)
    before, items, after = _opening(template, item_text, task)
    shown = items[max(len(items) - listed, 0) :]
    history = "".join(_history_item(template, item_text, item) for item in shown)
    lines = [_candidate(template, item_text, task, slot, 0) for slot in range(len(task.candidates))]
    return [frame.head + before + history + after, *lines, template.fill("closing") + frame.tail]


def _opening(
    template: PromptTemplate, item_text: ItemText, task: RankingTask
) -> tuple[str, tuple[int, ...], str]:
    """Text before the history, the items that the template lists, and text after; none are listed without a place."""
    kinds = template.separator.join(history_kinds(item_text, task.history)).replace(_HISTORY, "")
    before, place, after = template.fill("opening", kinds=kinds, history=_HISTORY).partition(_HISTORY)
    listed = min(template.history_items, len(task.history)) if place else 0
    return before, task.history[len(task.history) - listed :], after


def _history_item(template: PromptTemplate, item_text: ItemText, item: int) -> str:
    return template.fill("history_item", **_item_words(template, item_text, item, 0))


def _candidate(template: PromptTemplate, item_text: ItemText, task: RankingTask, slot: int, cut: int) -> str:
    """The line of the candidate in `slot`, `cut` of its words left out."""
    facts = zip(task.fact_names, task.levels[slot].tolist(), strict=True)
    return template.fill(
        "candidate",
        label=label(slot),
        facts="".join(template.render_fact("fact", name, level) for name, level in facts),
        **_item_words(template, item_text, task.candidates[slot], cut),
    )


def _item_words(template: PromptTemplate, item_text: ItemText, item: int, cut: int) -> dict[str, str]:
    """An item in words, `cut` of them left out: the last of the title first, then broad categories, then the brand."""
    title = item_text.title(item).split()[: template.title_words]
    kinds, brand = item_text.categories[item] or (UNKNOWN,), item_text.brands[item] or UNKNOWN
    kept = len(title) + len(kinds) + 1 - cut
    return {
        "sid": item_text.sid(item),
        "title": plain(" ".join(title[: max(kept - len(kinds) - 1, 0)])),
        "kinds": plain(template.separator.join(kinds[max(len(kinds) + 1 - kept, 0) :])),
        "brand": plain(" ".join(brand.split())) if kept else "",
    }


def _cuttable(template: PromptTemplate, item_text: ItemText, item: int) -> int:
    """How many words of an item can be left out."""
    title = item_text.title(item).split()[: template.title_words]
    return len(title) + len(item_text.categories[item] or (UNKNOWN,)) + 1


def history_kinds(item_text: ItemText, history: Sequence[int], recent: int = 10, most: int = 2) -> list[str]:
    """The categories most frequent in the last `recent` items; ties go to the newer one."""
    counts = Counter(kind for item in reversed(history[-recent:]) for kind in item_text.categories[item])
    return [plain(kind) for kind, _ in counts.most_common(most)] or [UNKNOWN]
