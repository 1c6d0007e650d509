"""The ranked list of an answer as an assignment of candidates to places: the likeliest one without a repeated label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment


def answer_slots(tokens: Sequence[int], labels: Sequence[int]) -> list[int]:
    """Indices of the last labels in `tokens` that are separated by the same tokens: the list that ends an answer."""
    known = set(labels)
    found = [index for index, token in enumerate(tokens) if token in known]
    run = found[-1:]
    between: tuple[int, ...] | None = None
    for index in reversed(found[:-1]):
        gap = tuple(tokens[index + 1 : run[0]])
        if between is not None and gap != between:
            break
        between, run = gap, [index, *run]
    return run


def assign_labels(tokens: Sequence[int], labels: Sequence[int], log_probs: np.ndarray) -> tuple[int, ...]:
    """`tokens` with the labels of its list replaced so that the sum of their log-probabilities is largest.

    log_probs: float [T, N], log-probability of each label where the slot was committed. Unchanged when the list
    has more places than there are labels: no assignment without a repetition exists.
    """
    slots = answer_slots(tokens, labels)
    if not slots or len(slots) > len(labels):
        return tuple(tokens)
    gains = np.maximum(log_probs[slots], -1e9)
    places, chosen = linear_sum_assignment(gains, maximize=True)
    assigned = list(tokens)
    for place, label in zip(places.tolist(), chosen.tolist(), strict=True):
        assigned[slots[place]] = labels[label]
    return tuple(assigned)
