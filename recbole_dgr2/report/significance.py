"""Uncertainty of means over users: bootstrap intervals, paired tests, and the interval of a share.

A mean depends on users only through how often each value occurs. Resamples are therefore drawn as multinomial
counts of the distinct values: the same distribution as resampling users, at a cost that hardly grows with the
number of users (a rank metric has at most N + 1 values), and the same for any order of the users.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]

LEVEL = 0.95
_CELLS = 4_000_000  # counts drawn at once: 32 MB
_SLACK = 1e-12  # means that are equal but for rounding count as ties


@dataclass(frozen=True)
class PairedTest:
    """System a against b on the same users: `difference` = mean(a - b), its interval, two-sided p-values."""

    difference: float
    ci95: Interval
    p_bootstrap: float
    p_permutation: float
    p_sign: float
    wins: int
    losses: int


def exact_mean(values: FloatArray) -> float:
    """Mean of values [R], R >= 1, summed without rounding: the same for any order of users."""
    return math.fsum(values) / len(values)


def bootstrap_intervals(
    per_user: Mapping[str, npt.ArrayLike], samples: int, seed: int
) -> dict[str, Interval]:
    """Percentile bootstrap 95 % intervals of means over users (Efron 1981), one set of resamples for all.

    Args:
        per_user: metric name -> value a user, [R], R >= 1.
        samples: bootstrap resamples. seed: of the resampling.
    """
    values = np.stack([_values(name, value) for name, value in per_user.items()], axis=1)
    _check_samples(samples)
    draws = _bootstrap_means(values, samples, seed)
    return {name: _interval(draws[:, i], values[:, i]) for i, name in enumerate(per_user)}


def paired_test(a: npt.ArrayLike, b: npt.ArrayLike, samples: int, seed: int) -> PairedTest:
    """Compare one metric of two systems on the same users, [R] each, in the same order of users.

    `p_bootstrap` is the smallest level whose percentile interval of the difference excludes 0,
    `p_permutation` that of the sign-flip test on the mean difference, `p_sign` that of the exact sign test
    (ties dropped). Two-sided.
    """
    first, second = _values("a", a), _values("b", b)
    if first.shape != second.shape:
        raise ValueError(
            f"paired test of {len(first)} against {len(second)} users: both systems need the same users"
        )
    _check_samples(samples)
    difference = first - second
    draws = _bootstrap_means(difference[:, None], samples, seed)[:, 0]
    tail = int(min((draws <= _SLACK).sum(), (draws >= -_SLACK).sum()))
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return PairedTest(
        difference=exact_mean(difference),
        ci95=_interval(draws, difference),
        p_bootstrap=min(1.0, 2 * (1 + tail) / (samples + 1)),
        p_permutation=_sign_flip_p(difference, samples, seed),
        p_sign=float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0,
        wins=wins,
        losses=losses,
    )


def wilson_interval(successes: int, total: int) -> Interval:
    """Wilson score 95 % interval of a share (Wilson 1927)."""
    if not 0 <= successes <= total or total < 1:
        raise ValueError(f"{successes} of {total} is no share: at least one answer is needed")
    interval = stats.binomtest(int(successes), int(total)).proportion_ci(LEVEL, method="wilson")
    share = successes / total  # rounding can leave the ends a hair inside 0 or 1
    return min(float(interval.low), share), max(float(interval.high), share)


def _interval(draws: FloatArray, values: FloatArray) -> Interval:
    """Percentile interval of the draws; holds the mean of values in spite of rounding where users agree."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = exact_mean(values)
    return min(float(low), mean), max(float(high), mean)


def _bootstrap_means(values: FloatArray, samples: int, seed: int) -> FloatArray:
    """Means of `samples` resamples of the rows of values [R, M], [samples, M]."""
    distinct, counts = np.unique(values, axis=0, return_counts=True)
    rng, total = np.random.default_rng(seed), len(values)
    chunk = max(1, _CELLS // len(distinct))
    sizes = [min(chunk, samples - start) for start in range(0, samples, chunk)]
    return np.concatenate(
        [rng.multinomial(total, counts / total, size=size) @ distinct / total for size in sizes]
    )


def _sign_flip_p(difference: FloatArray, samples: int, seed: int) -> float:
    """Two-sided p-value of the sum under random signs; users of one |difference| share a binomial draw."""
    size, counts = np.unique(np.abs(difference), return_counts=True)
    rng, observed = np.random.default_rng(seed), abs(difference.sum())
    chunk = max(1, _CELLS // len(size))
    slack, extreme = _SLACK * len(difference), 0
    for start in range(0, samples, chunk):
        plus = rng.binomial(counts, 0.5, size=(min(chunk, samples - start), len(size)))
        extreme += int((np.abs((2 * plus - counts) @ size) >= observed - slack).sum())
    return (1 + extreme) / (samples + 1)


def _values(name: str, values: npt.ArrayLike) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(
            f"{name}: one finite value a user and at least one user are needed, got shape {array.shape}"
        )
    return array


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise ValueError(f"bootstrap_samples is {samples}: at least 1 is needed (2000 is usual)")
