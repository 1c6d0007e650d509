"""Metrics against hand-computed values and RecBole's own formulas, intervals and tests against scipy's."""

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from recbole_dgr2.report import evaluation as ev
from recbole_dgr2.report import significance as sig


@dataclass(frozen=True)
class Answer:
    order: tuple[int, ...]
    valid: bool = True
    failures: tuple[str, ...] = ()


hit_lists = st.integers(1, 12).flatmap(
    lambda n: st.lists(
        st.tuples(st.integers(0, n - 1), st.permutations(range(n)).map(tuple)), min_size=1, max_size=12
    ).map(lambda hits: (n, np.array([rank for rank, _ in hits]), [order for _, order in hits]))
)


def test_rank_after_is_the_place_of_the_target_slot() -> None:
    orders = [(2, 0, 1), (2, 0, 1), (2, 0, 1), (1, 0)]
    assert ev.rank_after([0, 1, 2, 1], orders).tolist() == [1, 2, 0, 0]
    assert ev.rank_after(np.array([0, 1]), np.array([[1, 0], [1, 0]])).tolist() == [1, 0]
    assert ev.rank_after([], []).tolist() == []


@pytest.mark.parametrize(
    ("before", "orders", "message"),
    [
        ([0], [(0, 1), (1, 0)], "2 orders for 1 hit users"),
        ([0, 0], [(0, 1), (1, 1)], r"order \[1, 1\] of hit user 1 is no permutation"),
        ([0], [(1, 2)], "no permutation of 0..1"),
        ([0, 2], [(0, 1, 2), (1, 0)], "hit user 1 has 2 candidates, but target slot 2"),
        ([0.5], [(0, 1)], "whole numbers"),
        ([-1], [(0, 1)], "whole numbers"),
    ],
)
def test_rank_after_refuses(before: list, orders: list, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ev.rank_after(before, orders)
    assert "\n" not in str(error.value)


def test_metrics_by_hand() -> None:
    # ranks 0, 2, 3, 9: hits of recall@1 1, @3 2, @5 3, @10 4; ndcg terms 1, 1/log2(4), 1/log2(5), 1/log2(11)
    means = ev.mean_metrics([0, 2, 3, 9], 10)
    assert list(means) == list(ev.METRICS)
    assert means == pytest.approx(
        {
            "recall@1": 1 / 4,
            "recall@3": 2 / 4,
            "recall@5": 3 / 4,
            "recall@10": 1.0,
            "ndcg@3": 1.5 / 4,
            "ndcg@5": (1.5 + 1 / math.log2(5)) / 4,
            "ndcg@10": (1.5 + 1 / math.log2(5) + 1 / math.log2(11)) / 4,
            "mrr": (1 + 1 / 3 + 1 / 4 + 1 / 10) / 4,
        },
        abs=1e-15,
    )


def test_cutoffs_above_n_are_absent_and_mrr_stops_at_ten() -> None:
    assert list(ev.mean_metrics([0, 3], 4)) == ["recall@1", "recall@3", "ndcg@3", "mrr"]
    assert ev.mean_metrics([0, 3], 4)["mrr"] == pytest.approx((1 + 1 / 4) / 2)
    assert ev.mean_metrics([10], 20)["mrr"] == 0.0
    with pytest.raises(ValueError, match="n_candidates is 0"):
        ev.metric_names(0)


def test_formulas_equal_recbole(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("recbole")
    monkeypatch.setattr(np, "float", float, raising=False)  # an alias RecBole still uses
    from recbole.evaluator import metrics

    ranks, n = np.arange(10), 10
    hit = np.eye(n, dtype=int)[ranks]
    length = np.ones(n, dtype=int)
    expected = {
        "recall": metrics.Recall.metric_info(None, hit, length),
        "ndcg": metrics.NDCG.metric_info(None, hit, length),
        "mrr": metrics.MRR.metric_info(None, hit),
    }
    for name, values in ev.per_user_metrics(ranks, n).items():
        kind, _, cutoff = name.partition("@")
        assert np.array_equal(values, expected[kind][:, int(cutoff or 10) - 1]), name


@given(hit_lists, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_properties_of_the_hits_view(hits: tuple, random: Random) -> None:
    n, before, orders = hits
    identity = [tuple(range(n))] * len(before)
    assert ev.mean_metrics(ev.rank_after(before, identity), n) == ev.mean_metrics(before, n)
    ranks = ev.rank_after(before, orders)
    means, intervals = ev.hit_view(ranks, n, samples=40, seed=3)
    assert list(means) == list(intervals) == list(ev.metric_names(n))
    for name, (low, high) in intervals.items():
        assert 0 <= low <= means[name] <= high <= 1
    shuffled = list(range(len(ranks)))
    random.shuffle(shuffled)
    assert ev.hit_view(ranks[shuffled], n, samples=40, seed=3) == (means, intervals)


def test_no_hits_give_no_metrics_instead_of_nan() -> None:
    assert ev.hit_view([], 10, samples=100, seed=0) == ({}, {})


def test_intervals_agree_with_scipy_and_are_seeded() -> None:
    rng = np.random.default_rng(0)
    ranks = rng.integers(0, 10, 400)
    per_user = ev.per_user_metrics(ranks, 10)
    ours = sig.bootstrap_intervals(per_user, 4000, seed=1)
    assert ours == sig.bootstrap_intervals(per_user, 4000, seed=1)
    assert ours != sig.bootstrap_intervals(per_user, 4000, seed=2)
    for name in ("recall@1", "ndcg@5", "mrr"):
        theirs = stats.bootstrap(
            (per_user[name],), np.mean, n_resamples=4000, method="percentile", random_state=rng, batch=500
        ).confidence_interval
        assert ours[name] == pytest.approx((theirs.low, theirs.high), abs=0.005)


def test_chunked_draws_cover_continuous_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sig, "_CELLS", 1000)
    values = np.random.default_rng(0).normal(size=300)
    low, high = sig.bootstrap_intervals({"x": values}, 1000, seed=0)["x"]
    half = 1.96 * values.std() / math.sqrt(300)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)
    assert sig.paired_test(values + 0.5, np.zeros(300), 1000, seed=0).p_permutation < 0.01


def test_paired_test_agrees_with_scipy() -> None:
    rng = np.random.default_rng(5)
    b = 1 / (1 + rng.integers(0, 10, 150))
    a = np.where(rng.random(150) < 0.4, 1 / (1 + rng.integers(0, 10, 150)), b)
    ours = sig.paired_test(a, b, 20_000, seed=0)
    theirs = stats.permutation_test(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        n_resamples=5000,
        vectorized=True,
        random_state=rng,
    )
    assert ours.difference == pytest.approx((a - b).mean())
    assert ours.p_permutation == pytest.approx(theirs.pvalue, abs=0.02)
    assert ours.p_bootstrap == pytest.approx(theirs.pvalue, abs=0.05)
    assert ours.p_sign == stats.binomtest(ours.wins, ours.wins + ours.losses).pvalue
    swapped = sig.paired_test(b, a, 20_000, seed=0)
    assert (swapped.difference, swapped.wins, swapped.p_permutation) == (
        -ours.difference,
        ours.losses,
        ours.p_permutation,
    )


def test_paired_test_extremes() -> None:
    same = sig.paired_test([0.3, 0.7], [0.3, 0.7], 200, seed=0)
    assert (same.difference, same.ci95, same.p_bootstrap, same.p_permutation, same.p_sign) == (
        0,
        (0, 0),
        1,
        1,
        1,
    )
    better = sig.paired_test(np.ones(60), np.zeros(60), 999, seed=0)
    assert better.ci95 == (1, 1) and better.wins == 60 and better.losses == 0
    assert better.p_bootstrap == pytest.approx(2 / 1000) and better.p_permutation == pytest.approx(1 / 1000)
    # three users all better: 2 of the 8 sign patterns are as extreme
    assert sig.paired_test([1, 1, 1], [0, 0, 0], 20_000, seed=0).p_permutation == pytest.approx(
        0.25, abs=0.02
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
@settings(max_examples=40)
def test_paired_interval_contains_the_difference(pairs: list) -> None:
    a, b = (1 / (1 + np.array(side)) for side in zip(*pairs, strict=True))
    result = sig.paired_test(a, b, 50, seed=0)
    assert result.ci95[0] <= result.difference <= result.ci95[1]
    assert all(0 < p <= 1 for p in (result.p_bootstrap, result.p_permutation, result.p_sign))


def test_statistics_refuse_bad_input() -> None:
    with pytest.raises(ValueError, match="3 against 2 users"):
        sig.paired_test([1, 2, 3], [1, 2], 10, seed=0)
    with pytest.raises(ValueError, match="one finite value a user"):
        sig.bootstrap_intervals({"mrr": [0.5, math.nan]}, 10, seed=0)
    with pytest.raises(ValueError, match="at least one user"):
        sig.bootstrap_intervals({"mrr": []}, 10, seed=0)
    for call in (sig.bootstrap_intervals, None):
        with pytest.raises(ValueError, match="bootstrap_samples is 0"):
            call({"mrr": [0.5]}, 0, seed=0) if call else sig.paired_test([1], [1], 0, seed=0)


def test_wilson_by_hand() -> None:
    # centre (p + z^2/2n) / (1 + z^2/n), half width z sqrt(pq/n + z^2/4n^2) / (1 + z^2/n)
    z, n, p = stats.norm.ppf(0.975), 100, 0.95
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = ((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    assert sig.wilson_interval(95, 100) == pytest.approx(expected)
    for k, total in ((0, 7), (7, 7), (1, 1), (200, 200)):
        low, high = sig.wilson_interval(k, total)
        assert 0 <= low <= k / total <= high <= 1
    with pytest.raises(ValueError, match="3 of 2 is no share"):
        sig.wilson_interval(3, 2)


def test_validity_counts_answers_not_occurrences() -> None:
    answers = [
        Answer((0, 1)),
        Answer((0, 1), False, ("duplicate", "omission", "duplicate")),
        Answer((0, 1), False, ("unparsed",)),
        Answer((1, 0)),
    ]
    validity = ev.count_validity(answers)
    assert validity.failures == {"duplicate": 1, "omission": 1, "out_of_set": 0, "unparsed": 1}
    assert (validity.answers, validity.valid, validity.rate) == (4, 2, 0.5)
    assert validity.interval == sig.wilson_interval(2, 4)
    assert ev.copy_share(answers) == 0.5
    assert ev.copy_share(answers[1:3]) is None
    with pytest.raises(ValueError, match="no answers"):
        ev.count_validity([])
    with pytest.raises(ValueError, match="unknown failure kind 'dup'"):
        ev.count_validity([Answer((0,), False, ("dup",))])


def test_decoding_hits_alone_gives_the_same_metrics_of_all_users() -> None:
    rng = np.random.default_rng(2)
    users, n, width = 60, 5, 10
    ranked = np.stack([rng.permutation(40)[:width] + 1 for _ in range(users)])
    targets = rng.integers(1, 41, users)
    orders = [tuple(rng.permutation(n).tolist()) for _ in range(users)]
    hits = np.flatnonzero((ranked[:, :n] == targets[:, None]).any(axis=1))
    assert 0 < len(hits) < users
    everyone = ev.merge_hits(ranked, np.arange(users), orders)
    only_hits = ev.merge_hits(ranked, hits, [orders[row] for row in hits])
    assert not np.array_equal(everyone, only_hits)

    def metrics(lists: np.ndarray) -> dict[str, float]:
        found = lists == targets[:, None]
        return ev.mean_metrics(np.where(found.any(axis=1), found.argmax(axis=1), width), width)

    assert metrics(everyone) == metrics(only_hits)
    before = (ranked[hits] == targets[hits, None]).argmax(axis=1)
    share = len(hits) / users
    view = ev.mean_metrics(ev.rank_after(before, [orders[row] for row in hits]), n)
    assert metrics(only_hits)["ndcg@3"] == pytest.approx(view["ndcg@3"] * share)
    tail_hits = (ranked[:, n:] == targets[:, None]).any(axis=1).mean()
    assert metrics(only_hits)["recall@10"] == pytest.approx(share + tail_hits)


def test_merge_keeps_the_input_short_orders_and_padding() -> None:
    ranked = np.array([[5, 6, 7, 8], [1, 2, 0, 0]])
    assert ev.merge_hits(ranked, [1], [(1, 0)]).tolist() == [[5, 6, 7, 8], [2, 1, 0, 0]]
    assert ev.merge_hits(ranked, [], []).tolist() == ranked.tolist()
    assert ranked.tolist() == [[5, 6, 7, 8], [1, 2, 0, 0]]
    for rows, orders, message in (
        ([0, 0], [(0,), (0,)], "distinct"),
        ([2], [(0,)], "below 2"),
        ([0], [], "0 orders for 1 rows"),
        ([0], [(0, 0)], "of row 0 is no permutation"),
        ([0], [(0, 1, 2, 3, 4)], "no permutation"),
    ):
        with pytest.raises(ValueError, match=message):
            ev.merge_hits(ranked, rows, orders)


def test_repetition_by_hand() -> None:
    assert ev.repetition(["a b c d e f"]) == 0.0
    assert ev.repetition(["a a a a a a"]) == pytest.approx(2 / 3)  # 3 four-grams, 1 distinct
    assert ev.repetition([[7] * 6, [1, 2, 3]]) == pytest.approx(1 / 3)
    assert ev.repetition(["<c1><c1><c1><c1>"]) > 0.5
    with pytest.raises(ValueError, match="no outputs"):
        ev.repetition([])


def test_standard_metrics_of_recbole_results() -> None:
    result = {
        "recall@1": 0.1,
        "mrr@5": 0.2,
        "mrr@10": 0.25,
        "itemcoverage@10": 0.4,
        "ndcg@10": np.float64(0.3),
    }
    assert ev.standard_metrics(result) == {"recall@1": 0.1, "ndcg@10": 0.3, "mrr": 0.25}
