"""From a raw answer to a permutation of the candidates, and from a permutation to a reward.

The answer is checked as it stands: nothing is constrained while decoding. What is wrong with it is counted first, then
one rule repairs it (first occurrence wins, unknown entries are dropped, missing candidates follow in the retriever's
order), so that a caller always gets a permutation. The reward is also the evaluation: both read `Ranking`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recbole_dgr2.data.prompt import slot_of_label

Failure = Literal["duplicate", "omission", "out_of_set", "unparsed"]
FAILURES: tuple[Failure, ...] = ("duplicate", "omission", "out_of_set", "unparsed")

_FORMAT_BONUS = 0.2


@dataclass(frozen=True)
class Ranking:
    """A permutation of a row's candidate slots (best first), and what was wrong with the raw answer.

    `valid` is True only when the raw answer itself was that permutation.
    """

    order: tuple[int, ...]
    valid: bool
    failures: tuple[Failure, ...]


def identity_ranking(n: int) -> Ranking:
    """The retriever's own order of `n` candidates."""
    return Ranking(tuple(range(n)), True, ())


def parse_ranking(text: str, n: int, finished: bool) -> Ranking:
    """Read the ranked list of `n` candidates from a raw response.

    Args:
        text: the decoded response; the last JSON object in it counts.
        n: number of candidates of the row.
        finished: whether the model ended its response; one that was cut off counts as unparsed even if a list can
            be read from it, but that list is still used for the order.
    """
    labels = _recommended_labels(text)
    if labels is None:
        return Ranking(tuple(range(n)), False, ("unparsed",))
    slots = [slot_of_label(label) for label in labels]
    known = [slot for slot in slots if slot is not None and slot < n]
    first = list(dict.fromkeys(known))
    present = set(first)
    found: dict[Failure, bool] = {
        "duplicate": len(first) < len(known),
        "omission": len(first) < n,
        "out_of_set": len(known) < len(slots),
        "unparsed": not finished,
    }
    failures = tuple(name for name in FAILURES if found[name])
    order = (*first, *(slot for slot in range(n) if slot not in present))
    return Ranking(order, not failures, failures)


def reward(slot_before: int, slot_after: int, n: int, valid: bool, conditional_bonus: bool = True) -> float:
    """Re-ranking reward R = R_rank + 0.2 * R_fmt of one answer (Diffusion-GR2, Eq. 3 and Section 3.6).

    R_rank = (slot before - slot after) / n. The format bonus is paid only where the target strictly rises, or was
    first and stays first; otherwise copying the input order would earn it (`conditional_bonus` False: it is paid for
    every valid answer, as an ablation). An invalid answer gets -1.
    """
    if not valid:
        return -1.0
    rises = slot_after < slot_before or slot_before == slot_after == 0
    return (slot_before - slot_after) / n + (_FORMAT_BONUS if rises or not conditional_bonus else 0.0)


@dataclass(frozen=True)
class Judgement:
    """What an answer is worth: its reward, whether it is valid, and whether it is valid and repeats the input order."""

    reward: float
    valid: bool
    copied: bool


@dataclass(frozen=True)
class RankingJudge:
    """Rewards answers of lists whose targets are candidates.

    slots: slot of the target and number of candidates, by the list's key. conditional_bonus: see `reward`.
    """

    slots: Mapping[int, tuple[int, int]]
    conditional_bonus: bool = True

    def __call__(self, key: int, text: str, finished: bool) -> Judgement:
        """The judgement of one raw answer; `finished` as in `parse_ranking`."""
        slot, n = self.slots[key]
        ranking = parse_ranking(text, n, finished)
        value = reward(slot, ranking.order.index(slot), n, ranking.valid, self.conditional_bonus)
        return Judgement(value, ranking.valid, ranking.valid and ranking.order == tuple(range(n)))


def last_object(text: str) -> tuple[int, int, dict[str, object]]:
    """Start, end and content of the last JSON object in `text`; it is empty, at the end, where there is none.

    An object inside another, or inside a text of another, is none of its own.
    """
    decoder = json.JSONDecoder()
    found: tuple[int, int, dict[str, object]] = (len(text), len(text), {})
    start = text.find("{")
    while start >= 0:
        try:
            content, end = decoder.raw_decode(text, start)
            found = (start, end, content)
        except (ValueError, RecursionError):  # degenerate answers nest without end, or hold endless numbers
            end = start + 1
        start = text.find("{", end)
    return found


def _recommended_labels(text: str) -> Sequence[str] | None:
    """Entries of "recommendations" in the last JSON object of `text`; None where there is no such list of strings."""
    labels = last_object(text)[2].get("recommendations")
    if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
        return labels
    return None
