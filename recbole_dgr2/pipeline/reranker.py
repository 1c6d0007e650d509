"""The re-ranker: candidates to prompts, prompts to raw answers, raw answers to rankings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.prompt import PromptBuilder
from recbole_dgr2.data.ranking import Ranking, identity_ranking, parse_ranking
from recbole_dgr2.data.tasks import RankingTask, TaskBuilder
from recbole_dgr2.decode.engine import decode
from recbole_dgr2.decode.types import DecodeOptions, DecodeResult, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec


@dataclass(frozen=True)
class LanguageModelReranker:
    """A reasoning language model that re-ranks; plugs into `DGR2` as its `reranker`.

    `spec` is None for an autoregressive checkpoint, which only decodes in mode "autoregressive".
    """

    tasks: TaskBuilder
    prompts: PromptBuilder
    backbone: Backbone
    spec: BlockDiffusionSpec | None
    options: DecodeOptions

    def with_options(self, options: DecodeOptions) -> LanguageModelReranker:
        """The same model decoded in another way."""
        return replace(self, options=options)

    def requests(self, tasks: Sequence[RankingTask]) -> list[Request]:
        """What the decoder is given for each task."""
        return [Request(task.key, self.prompts.build(task).token_ids) for task in tasks]

    def decode(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> DecodeResult:
        """Raw completions, in the order of the requests."""
        return decode(
            self.backbone.model,
            requests,
            self.options,
            eos_id=self.backbone.eos_id,
            spec=self.spec,
            progress=progress,
        )

    def rankings(self, tasks: Sequence[RankingTask], result: DecodeResult) -> list[Ranking]:
        """The rankings that raw completions stand for, one a task."""
        return [
            parse_ranking(text, len(task.candidates), completion.finished)
            for task, text, completion in zip(tasks, self.texts(result), result.completions, strict=True)
        ]

    def texts(self, result: DecodeResult) -> list[str]:
        """Completions as text."""
        tokenizer = self.backbone.tokenizer
        return [
            str(tokenizer.decode([token for token in completion.token_ids if token != self.backbone.eos_id]))
            for completion in result.completions
        ]

    def rerank(self, candidates: Candidates, histories: list[np.ndarray]) -> list[Ranking]:
        """One permutation of all N slots a row; a row without candidates keeps its order."""
        filled = np.flatnonzero(candidates.counts > 0)
        tasks = self.tasks.build(candidates.take(filled), [histories[row] for row in filled])
        found = self.rankings(tasks, self.decode(self.requests(tasks))) if tasks else []
        rankings = [identity_ranking(candidates.n)] * len(candidates)
        for row, ranking in zip(filled.tolist(), found, strict=True):
            rest = range(len(ranking.order), candidates.n)
            rankings[row] = replace(ranking, order=(*ranking.order, *rest))
        return rankings
