"""One stage of a study: decoded in every way that is asked for, and timed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from tqdm import tqdm

from recbole_dgr2.data.ranking import Ranking
from recbole_dgr2.data.tasks import RankingTask
from recbole_dgr2.decode import DecodeOptions, DecodeResult, Request
from recbole_dgr2.pipeline.bench import contender
from recbole_dgr2.pipeline.preparation import Lists, tasks_of
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.study_members import RunLists
from recbole_dgr2.report.assessment import Panel, assess_reranker
from recbole_dgr2.report.evaluation import Validity, count_validity, mean_metrics
from recbole_dgr2.report.speed import speed_entry
from recbole_dgr2.report.study_figures import AR, SAMPLES, SPECULATIVE
from recbole_dgr2.report.throughput import NothingTimedError, measure

BATCH = 64
ROUNDS = 3
"""Times that each decoder goes through the timed requests."""

logger = logging.getLogger(__name__)


def panel_of(lists: Lists, sample: np.ndarray, seed: int) -> Panel:
    """The panel of a run's report on these lists; metrics over all users are not rounded as RecBole rounds them."""

    def metrics(ranked: np.ndarray) -> dict[str, float]:
        found = (ranked == lists.targets[:, None]) & (ranked != 0)
        width = ranked.shape[1]
        means = mean_metrics(np.where(found.any(axis=1), found.argmax(axis=1), width), width)
        return {"mrr@10" if name == "mrr" else name: value for name, value in means.items()}

    return Panel(lists.candidates, lists.targets, lists.lists, sample, metrics, SAMPLES, seed)


def take(lists: Lists, rows: np.ndarray) -> Lists:
    """Some of the lists."""
    histories = [lists.histories[row] for row in rows.tolist()]
    return Lists(lists.candidates.take(rows), lists.lists[rows], lists.targets[rows], histories)


@dataclass(frozen=True)
class Bank:
    """The prompts of one model: of all hits and of the sample, or of the sample alone, each built once.

    tested: the test lists; sample: int64 [S], rows of them; seed: of intervals and of the timed hits.
    """

    reranker: LanguageModelReranker
    tested: RunLists
    sample: np.ndarray
    seed: int

    @cached_property
    def _made(self) -> dict[int, tuple[RankingTask, Request]]:
        rows = np.union1d(self.tested.hits, self.sample)
        tasks = tasks_of(self.reranker.tasks, self.tested.lists, rows)
        return dict(zip(rows.tolist(), zip(tasks, self.reranker.requests(tasks), strict=True), strict=True))

    def entry(self, decoder: str, base: DecodeOptions, whole: bool) -> dict[str, Any]:
        """What one decoder answers: accuracy, validity, tokens a pass; see `report.study_figures`.

        `whole`: all hits and the sample are decoded, else the sample alone.
        """
        hits = self.tested.hits
        rows = np.arange(len(self.tested.lists.targets)) if whole else self.sample
        lists = self.tested.lists if whole else take(self.tested.lists, rows)
        sample = self.sample if whole else np.arange(len(rows))
        results: list[DecodeResult] = []
        answered: dict[int, tuple[Ranking, tuple[int, ...]]] = {}

        def rank_rows(places: np.ndarray) -> Sequence[Ranking]:
            chosen = [self._made[row] for row in rows[places].tolist()]
            tasks, requests = [task for task, _ in chosen], [request for _, request in chosen]
            result = self._decode(decoder, base, requests)
            rankings = self.reranker.rankings(tasks, result)
            tokens = [completion.token_ids for completion in result.completions]
            answered.update(zip(places.tolist(), zip(rankings, tokens, strict=True), strict=True))
            results.append(result)
            return rankings

        panel = panel_of(lists, sample, self.seed)
        row = assess_reranker(decoder, panel, rank_rows)
        found = None if whole else np.flatnonzero(np.isin(hits, self.sample))
        of_hits = [answered[place][0] for place in panel.hits.tolist()]
        (result,) = results
        assert row.validity is not None
        return {
            "decoder": decoder,
            "hits": dict(row.hits),
            "ranks": as_text(row.ranks),
            "rows": None if found is None else as_text(found.tolist()),
            "all": dict(row.all_users) if whole else {},
            "valid": _counts(row.validity),
            "hits_valid": _counts(count_validity(of_hits)) if of_hits else None,
            "copied": row.copied,
            "tokens_per_pass": result.tokens_per_forward,
            "acceptance": result.acceptance_rate if decoder == SPECULATIVE else None,
            "outputs": " ".join(_short(answered[place][1]) for place in sample.tolist()),
        }

    def speed(self, decoders: Sequence[str], base: DecodeOptions, count: int) -> dict[str, Any]:
        """Speed of each decoder at batch 1 on `count` hits drawn by seed (of the sample, where there is no hit).

        Empty, with a warning, where answers are too short to have a speed.
        """
        rows = self.tested.hits if len(self.tested.hits) else self.sample
        drawn = np.random.default_rng(self.seed).permutation(rows)[:count]
        requests = [self._made[row][1] for row in drawn.tolist()]
        alone = replace(base, batch_size=1)
        timed = {name: self.reranker.with_options(options_of(name, alone)).decode for name in decoders}
        try:
            speeds = measure(timed, requests, baseline=AR, rounds=ROUNDS)
        except NothingTimedError as error:
            logger.warning("speed is left out: %s", error)
            return {}
        return {name: speed_entry(speed) for name, speed in speeds.items()}

    def _decode(self, decoder: str, base: DecodeOptions, requests: Sequence[Request]) -> DecodeResult:
        reranker = self.reranker.with_options(options_of(decoder, base))
        with tqdm(total=len(requests), desc=decoder, unit="answer", leave=False, disable=None) as bar:
            return reranker.decode(requests, lambda count: _show(bar, count))


def options_of(decoder: str, base: DecodeOptions) -> DecodeOptions:
    """Options of a decoder by its name (`pipeline.bench.contender`)."""
    one = contender(decoder)
    return replace(base, mode=one.mode, **one.options)  # type: ignore[arg-type]


def plain_entry(tested: RunLists, ranks: Sequence[int], seed: int) -> dict[str, Any]:
    """The entry of a system without a language model, from the ranks of the hits."""
    panel = panel_of(tested.lists, np.array([], dtype=np.int64), seed)
    own = np.array(ranks, dtype=np.int64)
    width = tested.lists.lists.shape[1]
    found = (tested.lists.lists == tested.lists.targets[:, None]) & (tested.lists.lists != 0)
    everyone = np.where(found.any(axis=1), found.argmax(axis=1), width)
    everyone[panel.hits] = own
    return {
        "hits": panel.hit_metrics(own)[0],
        "ranks": as_text(own.tolist()),
        "rows": None,
        "all": mean_metrics(everyone, width),
        "valid": None,
        "hits_valid": None,
        "copied": None,
        "tokens_per_pass": None,
        "acceptance": None,
        "equal_to_ar": None,
    }


def equal_share(own: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Share of the sample's outputs that two entries have in common, token for token."""
    pairs = zip(own["outputs"].split(), other["outputs"].split(), strict=True)
    return float(np.mean([a == b for a, b in pairs]))


def as_text(numbers: Sequence[int]) -> str:
    """Whole numbers as one text: an array of thousands would take a line each."""
    return " ".join(map(str, numbers))


def _counts(validity: Validity) -> dict[str, Any]:
    return {"answers": validity.answers, "valid": validity.valid, "failures": dict(validity.failures)}


def _short(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(as_text(token_ids).encode()).hexdigest()[:8]


def _show(bar: Any, count: int) -> None:
    bar.update(count - bar.n)
