"""General recommenders of RecBole that score a history: they need no user of their own, so unseen users can be scored.

RecBole scores its general models by user id, from the interactions of training. Some of them are a matrix of item
similarities underneath, and can score any list of items; `user_folds` needs that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from recbole_dgr2.model.scorer import Retriever

ITEM_SIMILARITIES = {"ItemKNN": "w", "EASE": "item_similarity", "SLIMElastic": "item_similarity"}
"""Attribute that holds the item-item matrix [n_items, n_items] of a model: a user's scores are history @ matrix."""
USER_FREE = ("Pop",)
"""General models that give every user the same scores."""


class UserBoundError(ValueError):
    """A model that cannot score the history of a user whom it was not trained on."""


def history_scorer(retriever: Retriever) -> Retriever:
    """The same retriever as one whose scores depend on the history alone.

    Raises:
        UserBoundError: the model cannot score the history of a user whom it was not trained on; the message names
            models that can.
    """
    if retriever.kind == "sequential":
        if _reads_users(retriever):
            raise UserBoundError(_refusal(retriever.name, "has a vector for every user"))
        return retriever
    if retriever.name in USER_FREE:
        return retriever
    if getattr(retriever.model, "method", "item") == "user":
        raise UserBoundError(_refusal(retriever.name, "with knn_method user compares users"))
    if retriever.name in ITEM_SIMILARITIES:
        return HistoryRetriever(retriever)
    raise UserBoundError(_refusal(retriever.name, "scores users by their id"))


def _refusal(name: str, reason: str) -> str:
    able = ", ".join([*ITEM_SIMILARITIES, *USER_FREE])
    return (
        f"candidate_split user_folds: {name} {reason}, so it cannot score users it was not trained on; use last_m, or "
        f"a retriever that scores histories ({able}, or a sequential one without user vectors such as SASRec)"
    )


def _reads_users(retriever: Retriever) -> bool:
    """Whether a sequential model scores one history differently for different users."""
    users = np.arange(1, min(retriever.info.vocabulary.n_users, 9), dtype=np.int64)
    history = np.arange(1, min(retriever.info.vocabulary.n_items, 4), dtype=np.int64)
    scores = retriever.score(users, [history] * len(users))
    return not torch.allclose(scores, scores[:1].expand_as(scores), rtol=1e-4, atol=1e-5)


class HistoryRetriever(Retriever):
    """An item-similarity model that scores the history it is given instead of the one it was trained with.

    With a user's training interactions as history the scores are those of the model itself.
    """

    def __init__(self, retriever: Retriever) -> None:
        vars(self).update(vars(retriever))
        matrix: Any = getattr(retriever.model, ITEM_SIMILARITIES[retriever.name])
        self._matrix = sp.csr_matrix(matrix) if sp.issparse(matrix) else np.asarray(matrix)

    def _raw_scores(self, users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        n_items = self.info.vocabulary.n_items
        lengths = [len(history) for history in histories]
        rows = np.repeat(np.arange(len(users)), lengths)
        items = np.concatenate([np.asarray(history) for history in histories]) if sum(lengths) else rows
        ones = np.ones(len(rows), dtype=np.float32)
        chosen = sp.csr_matrix((ones, (rows, items)), shape=(len(users), n_items))
        scores = chosen @ self._matrix
        dense = scores.toarray() if sp.issparse(scores) else np.asarray(scores)
        return torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32))
