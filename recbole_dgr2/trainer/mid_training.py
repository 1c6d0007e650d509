"""Mid-training: before it learns to re-rank, the language model learns what the tokens of semantic IDs mean."""

from __future__ import annotations

from recbole_dgr2.trainer.supervised import Supervised


class MidTraining(Supervised):
    """Next item by semantic ID, semantic ID to text, text to semantic ID; see `data.sid_lessons`.

    Source: GR2 (arXiv 2602.07774), mid-training, of which these tasks are the part that concerns items.
    """

    name = "mid_training"
