"""Where candidate lists come from: a recommender of RecBole under a candidate split, or a candidate file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recbole_dgr2.data.candidate_files import FileLists, FileOptions
from recbole_dgr2.data.candidates import Candidates, HeadOptions, build_candidates
from recbole_dgr2.data.parts import Part, final_part, training_parts
from recbole_dgr2.data.sequences import Phase, Rows, Sequences, leave_one_out_rows
from recbole_dgr2.pipeline.retrieval import RetrieverStore
from recbole_dgr2.pipeline.views import CandidateOptions
from recbole_dgr2.system.cache import Cache, Columns, copy_file, file_digest

LEAKY_WARNING = (
    "candidate_split leaky: the retriever and the facts of the training lists have seen their targets; "
    "whatever is trained on them is for comparison only"
)

logger = logging.getLogger(__name__)


class ListSource(Protocol):
    """Proposes the lists of each phase."""

    @property
    def name(self) -> str:
        """The retriever's name in reports."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the interactions that training lists, and the facts about them, come from."""
        ...

    def prepare(self) -> None:
        """Train what is needed and not in the cache."""
        ...

    def description(self, phase: Phase) -> dict[str, Any]:
        """Everything that decides the lists of a phase, as JSON values."""
        ...

    def lists(self, phase: Phase) -> Candidates:
        """max(N, max(topk)) items for every row of a phase."""
        ...

    def propose(self, rows: Rows) -> Candidates:
        """The same for any rows, as test lists are made."""
        ...

    def keep(self, folder: Path) -> None:
        """Put what `propose` needs into `folder`."""
        ...


class RetrieverSource:
    """Lists of a recommender; each table of lists is kept in the cache.

    Args:
        store: the recommender.
        sequences: all interactions.
        options: N and the candidate split.
        head: how lists are cut from score rows.
        cache: where tables are kept.
    """

    def __init__(
        self,
        store: RetrieverStore,
        sequences: Sequences,
        options: CandidateOptions,
        head: HeadOptions,
        cache: Cache,
    ) -> None:
        self.store = store
        self.parts = training_parts(sequences, options.split)
        self._sequences = sequences
        self._options = options
        self._head = head
        self._cache = cache
        self._final = final_part(sequences)
        if options.split.mode == "leaky":
            logger.warning(LEAKY_WARNING)

    @property
    def name(self) -> str:
        """The recommender's name."""
        return self.store.name

    def prepare(self) -> None:
        """Train the retrievers whose lists are not in the cache."""
        for phase in ("train", "valid", "test"):
            path = self._cache.path(f"candidates-{phase}", self.description(phase))
            if path is None or not path.exists():
                for part in self._parts_of(phase):
                    self.store.retriever(part)

    def description(self, phase: Phase) -> dict[str, Any]:
        """Everything that decides the lists of a phase."""
        split, head = self._options.split, self._head
        return {
            "phase": phase,
            "retrievers": [self.store.description(part) for part in self._parts_of(phase)],
            "split": vars(split) if phase == "train" else None,
            "width": head.n_candidates,
            "kmax": head.kmax,
            "mask_history": head.mask_history,
        }

    def lists(self, phase: Phase) -> Candidates:
        """Lists of a phase, from the cache or made now."""
        rows = leave_one_out_rows(self._sequences, phase, self._options.split.last_m)
        columns = self._cache.table(
            f"candidates-{phase}", self.description(phase), lambda: _columns(self._build(rows, phase))
        )
        return _candidates(rows, columns, self._head.n_candidates)

    def propose(self, rows: Rows) -> Candidates:
        """Lists of any rows by the final retriever."""
        return build_candidates(self.store.final().score, rows, self._sequences, self._head)

    def keep(self, folder: Path) -> None:
        """Put the final retriever's checkpoint into `folder`."""
        self.store.keep_final(folder)

    def _parts_of(self, phase: Phase) -> tuple[Part, ...]:
        return self.parts if phase == "train" else (self._final,)

    def _build(self, rows: Rows, phase: Phase) -> Candidates:
        if phase != "train":
            return self.propose(rows)
        width = self._head.n_candidates
        ids, scores = np.zeros((len(rows), width), dtype=np.int64), np.zeros((len(rows), width), np.float32)
        for part in self.parts:
            index = np.flatnonzero(part.serves[rows.users])
            score = self.store.retriever(part).score
            found = build_candidates(score, rows.take(index), self._sequences, self._head)
            ids[index], scores[index] = found.ids, found.scores
        return Candidates(rows, ids, scores)


class FileSource:
    """Lists of a candidate file; training lists are those of each user's last training interaction."""

    def __init__(self, lists: FileLists, sequences: Sequences, head: HeadOptions) -> None:
        self._lists = lists
        self._sequences = sequences
        self._options = FileOptions(head.n_candidates, head.mask_history)
        everyone = np.ones(sequences.n_users, dtype=bool)
        trained = sequences.training_lengths()
        self.parts: tuple[Part, ...] = (
            Part("file", np.maximum(trained - 1, np.minimum(trained, 1)), everyone),
        )

    @property
    def name(self) -> str:
        """The file's name."""
        return self._lists.path.name

    def prepare(self) -> None:
        """Nothing: the lists are there."""

    def description(self, phase: Phase) -> dict[str, Any]:
        """The file's content."""
        return {"phase": phase, "file": file_digest(self._lists.path), **vars(self._options)}

    def lists(self, phase: Phase) -> Candidates:
        """Lists of a phase; users without one have no candidates."""
        rows = leave_one_out_rows(self._sequences, phase)
        lists = self._lists.candidates(rows, self._sequences, phase, self._options)
        empty, short = lists.counts == 0, (lists.counts > 0) & (lists.counts < self._options.width)
        if phase == "test" and (empty.any() or short.any()):
            text = "%s: of %d test users %d have no candidates and %d fewer than %d"
            sizes = (len(lists), int(empty.sum()), int(short.sum()), self._options.width)
            logger.warning(text, self._lists.path, *sizes)
        return lists

    def propose(self, rows: Rows) -> Candidates:
        """The test lists of the rows' users."""
        return self._lists.candidates(rows, self._sequences, "test", self._options)

    def keep(self, folder: Path) -> None:
        """Put the file into `folder`."""
        copy_file(self._lists.path, folder / self._lists.path.name)


def _columns(lists: Candidates) -> Columns:
    """One line a slot, in the order of the rows: user, end of the history, slot, item, score."""
    width = lists.n
    return {
        "user": np.repeat(lists.rows.users, width).astype(np.int32),
        "end": np.repeat(lists.rows.ends, width).astype(np.int32),
        "slot": np.tile(np.arange(width, dtype=np.int16), len(lists)),
        "item": lists.ids.ravel().astype(np.int32),
        "score": lists.scores.ravel(),
    }


def _candidates(rows: Rows, columns: Columns, width: int) -> Candidates:
    ids = columns["item"].astype(np.int64).reshape(len(rows), width)
    return Candidates(rows, ids, columns["score"].astype(np.float32).reshape(len(rows), width))


def fact_columns(names: Sequence[str], facts: np.ndarray) -> Columns:
    """Facts float64 [R, N, F] as one column a fact, in the order of the slots."""
    flat = facts.reshape(-1, facts.shape[-1])
    return {name: np.ascontiguousarray(flat[:, place]) for place, name in enumerate(names)}
