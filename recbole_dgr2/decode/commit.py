"""Which masked slots of a block one denoising pass commits, as pure functions of what the pass says of them.

n rows, L slots a block. A slot that is not masked has confidence -1 and entropy +inf. Every rule commits at least one
slot in each row that has a masked one (the surest), so a block of L slots needs at most L - 1 passes.
"""

from __future__ import annotations

import numpy as np


def commit_set(
    rule: str, value: float, confidences: np.ndarray, entropies: np.ndarray | None = None
) -> np.ndarray:
    """bool [n, L] of the named rule (`DecodeOptions.rule`); confidences, entropies: float [n, L].

    value: the rule's number: tau, passes, f, or the bound of the entropy.
    """
    if rule == "entropy":
        assert entropies is not None
        return entropy_bounded(entropies, value)
    rules = {"threshold": threshold, "static": static_schedule, "factor": factor}
    return rules[rule](confidences, value)


def threshold(confidences: np.ndarray, tau: float) -> np.ndarray:
    """Slots of confidence >= tau, and the surest (Fast-dLLM, arXiv 2505.22618; Diffusion-GR2)."""
    return (confidences >= tau) | (_surest_first(-confidences) == 0) & (confidences >= 0)


def static_schedule(confidences: np.ndarray, passes: float) -> np.ndarray:
    """The ceil((L - 1) / passes) surest slots, whatever their confidence (LLaDA, arXiv 2502.09992, low-confidence).

    Slot 0 is the seed, so L - 1 slots are to be filled in at most `passes` passes.
    """
    quota = -(-(confidences.shape[1] - 1) // int(passes))
    return (_surest_first(-confidences) < max(quota, 1)) & (confidences >= 0)


def factor(confidences: np.ndarray, f: float) -> np.ndarray:
    """The k surest, for the largest k with (k + 1) * (1 - c_k) < f, c_k the k-th highest confidence (Fast-dLLM)."""
    place = _surest_first(-confidences)
    within = ((place + 2) * (1 - confidences) < f) & (confidences >= 0)
    last = np.where(within, place, 0).max(axis=1, keepdims=True)
    return (place <= last) & (confidences >= 0)


def entropy_bounded(entropies: np.ndarray, bound: float) -> np.ndarray:
    """Slots in order of rising entropy while the sum less the largest is <= bound (arXiv 2505.24857)."""
    order = entropies.argsort(axis=1, kind="stable")
    rising = np.take_along_axis(entropies, order, axis=1)
    before = np.cumsum(np.where(np.isfinite(rising), rising, 0.0), axis=1) - rising
    chosen = np.zeros(entropies.shape, dtype=bool)
    np.put_along_axis(chosen, order, before <= bound, axis=1)
    return chosen & np.isfinite(entropies)


def _surest_first(costs: np.ndarray) -> np.ndarray:
    """int64 [n, L]: place of each slot when its row is sorted by rising cost, equal ones from left to right."""
    return costs.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
