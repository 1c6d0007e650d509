"""Everything before a language model: data set, retrievers, candidates without leakage, facts, and the reasoner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.config import Config, retriever_config
from recbole_dgr2.data.candidates import Candidates, build_candidates
from recbole_dgr2.data.evidence import Evidence, fit_evidence, fit_fact_scale, measure_facts
from recbole_dgr2.data.item_text import ItemFields, ItemText, load_item_text
from recbole_dgr2.data.reasoner import Reasoner, fit_reasoner
from recbole_dgr2.data.sequences import Phase, Rows, Sequences, leave_one_out_rows
from recbole_dgr2.data.tasks import RankingTask, TaskBuilder
from recbole_dgr2.model.retriever import (
    checkpoint_options,
    holdout_lengths,
    load_retriever,
    train_holdout_retriever,
    train_retriever,
)
from recbole_dgr2.model.scorer import Retriever
from recbole_dgr2.utils import item_tokens, load_dataset, sequences_from_dataset
from recbole_dgr2.views import CandidateOptions, PromptOptions


@dataclass(frozen=True)
class Data:
    """A data set as the plugin sees it."""

    dataset: Any
    """RecBole's data set, not split."""
    sequences: Sequences
    item_text: ItemText


@dataclass(frozen=True)
class Retrievers:
    """`final` proposes candidates for validation and test; `holdout`, which has not seen the targets of the training
    lists, proposes theirs. `config` and `dataset` are RecBole's own for this recommender."""

    final: Retriever
    holdout: Retriever
    final_sequences: Sequences
    holdout_sequences: Sequences
    config: Any
    dataset: Any


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


@dataclass(frozen=True)
class Grounding:
    """What is known about candidates: training lists are grounded in the hold-out's statistics, all others in the
    final ones; both share one scale. The reasoner was fitted on the training lists."""

    training: TaskBuilder
    final: TaskBuilder
    reasoner: Reasoner


def load_data(config: Config, folder: Path, options: PromptOptions) -> Data:
    """Read the atomic files of the data set in `folder`."""
    dataset = load_dataset(config)
    fields = ItemFields(options.title_field, options.category_field, options.brand_field)
    text = load_item_text(folder / f"{config['dataset']}.item", fields, item_tokens(dataset))
    return Data(dataset, sequences_from_dataset(dataset), text)


def prepare_retrievers(config: Config, options: CandidateOptions, folder: Path) -> Retrievers:
    """Train (or load) the final retriever, and train its hold-out twin."""
    changes = checkpoint_options(options.checkpoint)[1] if options.checkpoint else {}
    host = retriever_config(config, **changes)
    dataset = load_dataset(host)
    if options.checkpoint:
        final = load_retriever(options.checkpoint, host, dataset)
    else:
        final = train_retriever(host, dataset, folder / "retriever")
    holdout = train_holdout_retriever(
        final, host, dataset, folder / "retriever_holdout", options.train_last_m
    )
    sequences = sequences_from_dataset(dataset)
    kept = holdout_lengths(sequences, options.train_last_m)
    return Retrievers(
        final=final,
        holdout=holdout,
        final_sequences=sequences.truncate(sequences.lengths - sequences.training_lengths()),
        holdout_sequences=sequences.truncate(sequences.lengths - kept),
        config=host,
        dataset=dataset,
    )


def make_lists(
    data: Data, retrievers: Retrievers, phase: Phase, options: CandidateOptions, kmax: int
) -> Lists:
    """Candidates for every row of a phase; for training, from the hold-out retriever."""
    rows: Rows = leave_one_out_rows(data.sequences, phase, options.train_last_m)
    retriever = retrievers.holdout if phase == "train" else retrievers.final
    wide = build_candidates(retriever.score, rows, data.sequences, options.head(kmax))
    candidates = Candidates(rows, wide.ids[:, : options.n], wide.scores[:, : options.n])
    return Lists(candidates, wide.ids, rows.targets(data.sequences), rows.histories(data.sequences))


def ground(
    data: Data, retrievers: Retrievers, train: Lists, options: PromptOptions, history_length: int
) -> Grounding:
    """Fit item statistics, the scale of the facts and the reasoner, all on training interactions."""
    holdout: Evidence = fit_evidence(retrievers.holdout_sequences, data.item_text)
    final = fit_evidence(retrievers.final_sequences, data.item_text)
    facts = measure_facts(holdout, train.candidates, train.histories)
    scale = fit_fact_scale(facts[train.candidates.counts > 0], options.fact_levels)
    reasoner = fit_reasoner(scale.levels(facts), train.slots, options.fact_levels)
    return Grounding(
        training=TaskBuilder(holdout, scale, history_length),
        final=TaskBuilder(final, scale, history_length),
        reasoner=reasoner,
    )


def draw_lists(lists: Lists, most: int, seed: int) -> np.ndarray:
    """int64: rows that have candidates, at most `most` of them, drawn by seed, in rising order."""
    filled = np.flatnonzero(lists.candidates.counts > 0)
    return np.sort(np.random.default_rng(seed).permutation(filled)[:most])


def tasks_of(builder: TaskBuilder, lists: Lists, rows: np.ndarray) -> list[RankingTask]:
    """Ranking tasks of some rows of a phase."""
    return builder.build(lists.candidates.take(rows), [lists.histories[row] for row in rows.tolist()])
