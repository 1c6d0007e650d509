"""DGR2 as a RecBole recommender: a retriever's scores with the best N candidates put into a new order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.model.abstract_recommender import SequentialRecommender
from recbole.utils import InputType

from recbole_dgr2.data.candidates import (
    Candidates,
    HeadOptions,
    exclude,
    head_arrays,
    permute_head,
    select_head,
)
from recbole_dgr2.data.sequences import Rows
from recbole_dgr2.model.retriever import Retriever
from recbole_dgr2.utils import sequences_from_dataset, vocabulary


class Ranked(Protocol):
    """What a re-ranker says about one row, e.g. a `data.ranking.Ranking`."""

    @property
    def order(self) -> Sequence[int]:
        """A permutation of the N candidate slots, new best first."""
        ...


class Reranker(Protocol):
    """Anything that orders candidates."""

    def rerank(self, candidates: Candidates, histories: list[np.ndarray]) -> Sequence[Ranked]:
        """One ranking a row, from the candidates and the whole histories (oldest first), and nothing else."""
        ...


class DGR2(SequentialRecommender):
    """A retriever whose N best items a re-ranker has reordered; scores of all other items are the retriever's.

    RecBole's Trainer, evaluator and case study work with it as with any sequential model. Of a batch only the
    user, `item_id_list` and `item_length` are read, so a score cannot depend on the label. There is nothing to
    train here: the stages train the re-ranker, `train_retriever` the retriever.

    Args:
        config: Reads `n_candidates`, `mask_history` and `topk`.
        dataset: Where the histories come from: an unsplit data set, or `train_data.dataset`.
        retriever: Scores items; of the same vocabularies as `dataset`.
        reranker: Orders candidates; None keeps the retriever's order, and then every RecBole metric is the
            retriever's own.

    Raises:
        ValueError: No retriever, other vocabularies, or N or max(topk) larger than the catalogue.
    """

    input_type = InputType.POINTWISE

    def __init__(
        self, config: Any, dataset: Any, retriever: Retriever | None = None, reranker: Reranker | None = None
    ) -> None:
        super().__init__(config, dataset)
        if retriever is None:
            raise ValueError("DGR2: no retriever; pass retriever=train_retriever(...) or load_retriever(...)")
        vocabulary(dataset).require(retriever.info.vocabulary, f"retriever {retriever.name}")
        self.options = HeadOptions(config["n_candidates"], max(config["topk"]), bool(config["mask_history"]))
        self.options.check(self.n_items)
        self.sequences = sequences_from_dataset(dataset)
        self.retriever = retriever
        self.retriever_model = retriever.model  # so that .to(device) and .eval() reach it
        self.reranker = reranker

    @torch.no_grad()
    def full_sort_predict(self, interaction: Interaction) -> torch.Tensor:
        """Scores `[B, n_items]`; padding, and the whole history if `mask_history`, are at -inf."""
        users = interaction[self.USER_ID].cpu().numpy()
        histories = self.histories(interaction)
        excluded = histories if self.options.mask_history else None
        scores = exclude(self.retriever.score(users, histories), excluded)
        if self.reranker is None:
            return scores
        n = self.options.n_candidates
        head = select_head(scores, n, self.options.kmax)
        values, ids = head_arrays(scores, head[:, :n])
        ends = np.array([len(history) for history in histories], dtype=np.int64)
        rankings = self.reranker.rerank(Candidates(Rows(users, ends), ids, values), histories)
        order = torch.tensor([list(r.order) for r in rankings], dtype=torch.long, device=scores.device)
        if order.shape != (len(users), n):
            raise ValueError(f"re-ranker: expected {len(users)} orders of {n} slots, got {list(order.shape)}")
        # A row in its old order keeps the retriever's very values, ties included.
        changed = (order != torch.arange(n, device=order.device)).any(dim=1)
        scores[changed] = permute_head(scores[changed], head[changed], order[changed])
        return scores

    def predict(self, interaction: Interaction) -> torch.Tensor:
        """Scores `[B]` of the items in `item_id`, for RecBole's sampled evaluation."""
        return self.full_sort_predict(interaction).gather(1, interaction[self.ITEM_ID][:, None]).squeeze(1)

    def calculate_loss(self, interaction: Interaction) -> torch.Tensor:
        """Not available: raises NotImplementedError."""
        raise NotImplementedError(
            "DGR2 is not trained by RecBole's Trainer.fit: the retriever is trained by train_retriever and the "
            "re-ranker by its stages"
        )

    def histories(self, interaction: Interaction) -> list[np.ndarray]:
        """Each row's whole history, oldest first, found from the user and the (truncated) `item_id_list`.

        A list shorter than its maximum is the whole history. Any other is looked for in the user's sequence; at
        several matching places the earliest is taken, so that nothing after the row is read. Where the data set
        is a training split the last item of a test row's list is new and follows the whole sequence.
        """
        users = interaction[self.USER_ID].tolist()
        lists = interaction[self.ITEM_SEQ].cpu().numpy()
        lengths = interaction[self.ITEM_SEQ_LEN].tolist()
        return [
            recent[:length] if length < self.max_seq_length else self._whole(user, recent[:length])
            for user, recent, length in zip(users, lists, lengths, strict=True)
        ]

    def _whole(self, user: int, recent: np.ndarray) -> np.ndarray:
        known = self.sequences.of(user)
        size = len(recent)
        if len(known) >= size:
            windows = np.lib.stride_tricks.sliding_window_view(known, size)
            places = np.flatnonzero((windows == recent).all(axis=1))
            if len(places):
                return known[: places[0] + size]
        if len(known) >= size - 1 and np.array_equal(known[len(known) - size + 1 :], recent[:-1]):
            return np.append(known, recent[-1])
        raise ValueError(
            f"user {user}: its {self.ITEM_SEQ} is no part of the user's sequence in the data set"
        )
