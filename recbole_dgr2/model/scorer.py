"""Scores of a trained RecBole recommender, from users and histories alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from recbole_dgr2.utils import Vocabulary, interaction_of

Kind = Literal["general", "sequential"]
PAIRS = 2**18
"""User-item pairs at a time for a model that can score nothing else; bounds its memory."""


@dataclass(frozen=True)
class RetrieverInfo:
    """What a retriever is, as written beside its checkpoint.

    Attributes:
        name: RecBole's model name.
        kind: "general" scores a user by id, "sequential" by the history.
        best_epoch: 0-based epoch of the weights.
        vocabulary: The id maps it was trained with.
    """

    name: str
    kind: Kind
    best_epoch: int
    vocabulary: Vocabulary


class Retriever:
    """A trained RecBole recommender that scores every item for users and histories.

    It is given user ids, histories and nothing else, so a score cannot depend on a label.
    """

    def __init__(self, model: torch.nn.Module, config: Any, dataset: Any, info: RetrieverInfo) -> None:
        self.model = model
        self.info = info
        self._user_field: str = config["USER_ID_FIELD"]
        self._list_field: str = config["ITEM_ID_FIELD"] + config["LIST_SUFFIX"]
        self._length_field: str = config["ITEM_LIST_LENGTH_FIELD"]
        self._max_length: int = config["MAX_ITEM_LIST_LENGTH"]
        self._device: torch.device = config["device"]
        self._item_features: dict[str, torch.Tensor] = dict(dataset.get_item_feature().interaction)

    @property
    def name(self) -> str:
        """RecBole's model name."""
        return self.info.name

    @property
    def kind(self) -> Kind:
        """Whether the user id or the history is scored."""
        return self.info.kind

    @property
    def best_epoch(self) -> int:
        """0-based epoch of the weights."""
        return self.info.best_epoch

    def item_table(self) -> np.ndarray:
        """The model's own item embeddings, float32 [>= n_items, d] by internal id.

        Raises:
            ValueError: it has none, like the models that keep item similarities.
        """
        n_items = self.info.vocabulary.n_items
        for name, weight in self.model.named_parameters():
            # a masked model (BERT4Rec) keeps a row more
            if "item" in name and weight.dim() == 2 and n_items <= len(weight) <= n_items + 1:
                return weight.detach().float().cpu().numpy()
        raise ValueError(
            f"retriever {self.name}: has no item embeddings; use another such as BPR or SASRec, or sid_embeddings=text"
        )

    @torch.no_grad()
    def score(self, users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        """Scores of all items, in the model's own precision (float32 or float64).

        Args:
            users: Internal user ids `[B]`.
            histories: Items of each user, oldest first; the last `MAX_ITEM_LIST_LENGTH` of them are used, by
                sequential retrievers only.

        Returns:
            `[B, n_items]` on the model's device; nothing is masked.

        Raises:
            ValueError: An unknown user, an empty history for a sequential retriever, a model that reads other
                fields of the interaction, or scores that are NaN or infinite.
        """
        n_users, n_items = self.info.vocabulary.n_users, self.info.vocabulary.n_items
        unknown = users[(users < 1) | (users >= n_users)]
        if len(unknown):
            raise ValueError(
                f"user {int(unknown[0])}: unknown to {self.name}, expected an id in 1..{n_users - 1}"
            )
        scores = self._raw_scores(users, histories)
        if scores.numel() != len(users) * n_items:
            raise ValueError(
                f"retriever {self.name}: {scores.numel()} scores for {len(users)} x {n_items} items"
            )
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float() if scores.is_floating_point() else scores.double()
        scores = scores.view(len(users), n_items)
        self._check_finite(scores[:, 1:], users)
        return scores

    def _raw_scores(self, users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
        """Whatever the model returns, of any shape and precision."""
        columns = self._columns(users, histories)
        self.model.eval()
        try:
            return self._full_scores(columns, self.info.vocabulary.n_items)
        except KeyError as error:
            raise ValueError(
                f"retriever {self.name}: reads the field {error.args[0]!r} to score, and only "
                f"{', '.join(columns)} are given; choose a retriever that needs no more"
            ) from error

    def _columns(self, users: np.ndarray, histories: list[np.ndarray]) -> dict[str, torch.Tensor]:
        columns = {self._user_field: torch.from_numpy(np.asarray(users, dtype=np.int64))}
        if self.kind == "general":
            return columns
        lists = np.zeros((len(users), self._max_length), dtype=np.int64)
        lengths = np.zeros(len(users), dtype=np.int64)
        for row, history in enumerate(histories):
            recent = history[-self._max_length :]
            lengths[row] = len(recent)
            lists[row, : len(recent)] = recent
        if len(users) and lengths.min() == 0:
            user = int(users[int(lengths.argmin())])
            raise ValueError(f"user {user}: no history, and {self.name} scores histories; leave the user out")
        columns[self._list_field] = torch.from_numpy(lists)
        columns[self._length_field] = torch.from_numpy(lengths)
        return columns

    def _full_scores(self, columns: dict[str, torch.Tensor], n_items: int) -> torch.Tensor:
        try:
            return self.model.full_sort_predict(interaction_of(columns, self._device))
        except NotImplementedError:
            return self._pairwise_scores(columns, n_items)

    def _pairwise_scores(self, columns: dict[str, torch.Tensor], n_items: int) -> torch.Tensor:
        """For models that score pairs only: every user with every item, as RecBole's Trainer does."""
        rows = max(1, PAIRS // n_items)
        blocks = []
        for start in range(0, len(next(iter(columns.values()))), rows):
            block = {name: column[start : start + rows] for name, column in columns.items()}
            count = len(block[self._user_field])
            pairs = {name: column.repeat_interleave(n_items, dim=0) for name, column in block.items()}
            for name, column in self._item_features.items():
                pairs[name] = column.repeat(count, *[1] * (column.dim() - 1))
            blocks.append(self.model.predict(interaction_of(pairs, self._device)).view(count, n_items))
        return torch.cat(blocks)

    def _check_finite(self, scores: torch.Tensor, users: np.ndarray) -> None:
        bad = torch.isnan(scores) | torch.isposinf(scores)
        if bad.any():
            user = int(users[int(bad.any(dim=1).nonzero()[0])])
            raise ValueError(
                f"retriever {self.name}: NaN or infinite scores (first for user {user}); lower its learning_rate"
            )
