"""Everything before a language model: data set, retrievers, candidates without leakage, facts, and the reasoner."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.config import Config
from recbole_dgr2.data.candidate_files import read_candidate_file
from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import FACTS, Evidence, FactScale, FactSource, fit_evidence, fit_fact_scale
from recbole_dgr2.data.item_text import ItemFields, ItemText, load_item_text
from recbole_dgr2.data.parts import Part, PartedEvidence, final_part
from recbole_dgr2.data.reasoner import Reasoner, fit_reasoner
from recbole_dgr2.data.semantic_id import SemanticIds
from recbole_dgr2.data.sequences import Phase, Sequences
from recbole_dgr2.data.tasks import RankingTask, TaskBuilder
from recbole_dgr2.pipeline.baselines import RankingData
from recbole_dgr2.pipeline.retrieval import RetrieverStore
from recbole_dgr2.pipeline.sources import FileSource, ListSource, RetrieverSource, fact_columns
from recbole_dgr2.pipeline.views import CandidateOptions, PromptOptions
from recbole_dgr2.system.cache import Cache, Columns
from recbole_dgr2.utils import item_tokens, load_dataset, sequences_from_dataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """A data set as the plugin sees it."""

    dataset: Any
    """RecBole's data set, not split."""
    sequences: Sequences
    item_text: ItemText
    sids: SemanticIds | None = None


@dataclass(frozen=True)
class Lists:
    """The lists of one phase: `lists` int64 [R, W] is the retriever's order, its first N are the candidates."""

    candidates: Candidates
    lists: np.ndarray
    targets: np.ndarray
    histories: Sequence[np.ndarray]

    @property
    def slots(self) -> np.ndarray:
        """int64 [R]: slot of the target, N where it is no candidate."""
        return self.candidates.rank_of(self.targets)

    @property
    def has_hits(self) -> bool:
        """Whether any list has its target among the candidates."""
        return bool((self.slots < self.candidates.n).any())


@dataclass(frozen=True)
class Host:
    """RecBole's own config and data set, by which lists are evaluated; `store` where they are a retriever's."""

    config: Any
    whole: Any
    store: RetrieverStore | None = None

    @property
    def dataset(self) -> Any:
        """The data that metrics of coverage and popularity count: the retriever's own; others read nothing of it."""
        counted = {"itemcoverage", "averagepopularity", "shannonentropy", "giniindex", "tailpercentage"}
        if self.store is not None and counted & {metric.lower() for metric in self.config["metrics"]}:
            return self.store.dataset
        return self.whole


@dataclass(frozen=True)
class Grounding:
    """What is known about candidates: training lists are grounded in the statistics of the parts they come from, all
    others in the final ones; both share one scale. The reasoner was fitted on the training lists.

    facts: float64 [R, N, F] of every list of a phase, by phase.
    """

    training: TaskBuilder
    final: TaskBuilder
    reasoner: Reasoner
    facts: Mapping[Phase, np.ndarray]


def load_data(config: Config, folder: Path, options: PromptOptions) -> Data:
    """Read the atomic files of the data set in `folder`."""
    dataset = load_dataset(config)
    fields = ItemFields(options.title_field, options.category_field, options.brand_field)
    text = load_item_text(folder / f"{config['dataset']}.item", fields, item_tokens(dataset))
    return Data(dataset, sequences_from_dataset(dataset), text)


def report_counts(data: Data, expected: Sequence[int] | None) -> None:
    """Log how many users, items and interactions there are, and warn where that is not what is expected of them."""
    dataset = data.dataset
    counts = (dataset.user_num - 1, dataset.item_num - 1, len(data.sequences.items))
    shown = "{:,} users, {:,} items, {:,} interactions"
    logger.info("%s: %s", dataset.dataset_name, shown.format(*counts))
    if expected is not None and tuple(expected) != counts:
        logger.warning(
            "%s: %s expected; figures of this run are not comparable with published ones (user_inter_num_interval, "
            "item_inter_num_interval and load_col decide the counts)",
            dataset.dataset_name,
            shown.format(*expected),
        )


def list_source(
    config: Config, options: CandidateOptions, data: Data, cache: Cache, fingerprint: dict[str, str]
) -> tuple[ListSource, Host]:
    """What proposes candidates, and what its lists are evaluated by.

    Raises:
        ValueError, FileNotFoundError: the checkpoint, the candidate file or the split does not fit.
    """
    head = options.head(max(config["topk"]))
    if options.file is not None:
        users, items = (_internal_ids(data.dataset, field) for field in ("uid_field", "iid_field"))
        return FileSource(read_candidate_file(options.file, users, items), data.sequences, head), Host(
            config, data.dataset
        )
    store = RetrieverStore(config, options, cache, fingerprint, data.dataset)
    host = Host(store.config, data.dataset, store)
    return RetrieverSource(store, data.sequences, options, head, cache), host


def _internal_ids(dataset: Any, field: str) -> dict[str, int]:
    tokens = dataset.field2id_token[getattr(dataset, field)]
    return {str(token): number for number, token in enumerate(tokens) if number}


def make_lists(data: Data, source: ListSource, phase: Phase, n: int) -> Lists:
    """Candidates for every row of a phase, and the lists they are the head of."""
    wide = source.lists(phase)
    rows = wide.rows
    candidates = Candidates(rows, wide.ids[:, :n], wide.scores[:, :n])
    return Lists(candidates, wide.ids, rows.targets(data.sequences), rows.histories(data.sequences))


class PartEvidence:
    """Item statistics of a part, gathered when the first fact is asked for: facts are mostly in the cache."""

    def __init__(self, part: Part, data: Data) -> None:
        self._part = part
        self._data = data

    @cached_property
    def evidence(self) -> Evidence:
        """The statistics."""
        return fit_evidence(self._part.sequences(self._data.sequences), self._data.item_text)

    def measure(self, candidates: Candidates, histories: Sequence[np.ndarray]) -> np.ndarray:
        """See `measure_facts`."""
        return self.evidence.measure(candidates, histories)


def _weigh(facts: np.ndarray, train: Lists, options: PromptOptions) -> tuple[FactScale, Reasoner]:
    """Scale of the `n_facts` facts that move the reasoner most, and the reasoner fitted on these alone."""
    filled = train.candidates.ids != 0
    scale = fit_fact_scale(facts[filled], options.fact_levels)
    levels = scale.levels(facts)
    every = fit_reasoner(levels, train.slots, options.fact_levels, filled=filled)
    strongest = every.strongest_facts(levels[filled], options.n_facts)
    scale = scale.only([scale.active[fact] for fact in strongest])
    reasoner = fit_reasoner(scale.levels(facts), train.slots, options.fact_levels, filled=filled)
    return scale, replace(reasoner, points_per_unit=float(options.points_per_unit))


def ground(
    data: Data, source: ListSource, phases: Mapping[Phase, Lists], options: PromptOptions, cached: CachedFacts
) -> Grounding:
    """Fit item statistics, the scale of the facts and the reasoner, all on training interactions.

    Args:
        data, source: the lists' items and origin.
        phases: lists of all phases.
        options: item text and levels.
        cached: where facts are kept, and how many recent items a task shows.
    """
    train = phases["train"]
    parts = tuple((part.serves, PartEvidence(part, data)) for part in source.parts)
    final = PartEvidence(final_part(data.sequences), data)
    origin: dict[str, FactSource] = {"train": PartedEvidence(parts)}
    text = {name: getattr(options, name) for name in ("title_field", "category_field", "brand_field")}
    facts = {
        phase: cached.measure(origin.get(phase, final), lists, {**source.description(phase), **text})
        for phase, lists in phases.items()
    }
    scale, reasoner = _weigh(facts["train"], train, options)
    return Grounding(
        training=TaskBuilder(origin["train"], scale, cached.history_length),
        final=TaskBuilder(final, scale, cached.history_length),
        reasoner=reasoner,
        facts=facts,
    )


@dataclass(frozen=True)
class CachedFacts:
    """Measures facts, or finds them in the cache; `history_length` is the number of recent items of a task."""

    cache: Cache
    fingerprint: dict[str, str]
    history_length: int

    def measure(self, evidence: FactSource, lists: Lists, description: dict[str, Any]) -> np.ndarray:
        """Facts of all candidates of a phase, float64 [R, N, F]."""

        def build() -> Columns:
            return fact_columns(FACTS, evidence.measure(lists.candidates, lists.histories))

        candidates = lists.candidates
        whole = {**description, "data": self.fingerprint, "facts": FACTS, "n": candidates.n}
        columns = self.cache.table(f"facts-{description['phase']}", whole, build)
        return np.stack([columns[name] for name in FACTS], axis=-1).reshape(*candidates.ids.shape, len(FACTS))


def ranking_data(facts: np.ndarray, lists: Lists) -> RankingData:
    """The lists of a phase as the baselines see them."""
    return RankingData(facts, lists.candidates.ids, lists.slots)


def draw_lists(lists: Lists, most: int, seed: int, hits_only: bool = False) -> np.ndarray:
    """int64: rows that have candidates, at most `most` of them, drawn by seed, in rising order.

    `hits_only`: of those alone that have their target among the candidates.
    """
    counts = lists.candidates.counts
    filled = np.flatnonzero(lists.slots < counts if hits_only else counts > 0)
    return np.sort(np.random.default_rng(seed).permutation(filled)[:most])


def tasks_of(builder: TaskBuilder, lists: Lists, rows: np.ndarray) -> list[RankingTask]:
    """Ranking tasks of some rows of a phase."""
    return builder.build(lists.candidates.take(rows), [lists.histories[row] for row in rows.tolist()])
