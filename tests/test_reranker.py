"""The re-ranker: raw answers to permutations of all N slots, for rows of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recbole_dgr2.data.evidence import fit_evidence, fit_fact_scale, measure_facts
from recbole_dgr2.data.prompt import PromptBuilder, label
from recbole_dgr2.data.ranking import identity_ranking
from recbole_dgr2.data.tasks import TaskBuilder
from recbole_dgr2.decode.types import DecodeOptions
from recbole_dgr2.model.backbone import Backbone, EmbeddedSpec, build_embedded, train_tokenizer
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.trainer import convert
from tests.reranking import ITEMS, ScriptedDecoder, candidates, sequences, template

LISTS = candidates([[3, 4, 1, 2], [0, 0, 0, 0], [5, 1, 0, 0], [2, 1, 3, 4], [4, 0, 0, 0]])
HISTORIES = [np.array(items, dtype=int) for items in ([1, 2], [1], [], [5, 5, 5], [3])]
EVIDENCE = fit_evidence(sequences([1, 2, 3], [2, 3], [3, 4]), ITEMS)
SCALE = fit_fact_scale(measure_facts(EVIDENCE, LISTS, HISTORIES), 4)


@pytest.fixture(scope="module")
def converted() -> tuple[Backbone, BlockDiffusionSpec]:
    tokenizer = train_tokenizer(["taste light <c1> red lamp rank:"], 300, [label(slot) for slot in range(4)])
    spec = EmbeddedSpec(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32)
    return convert(build_embedded(spec, tokenizer, 0), block_size=8)


def reranker(converted: tuple[Backbone, BlockDiffusionSpec], mode: str = "block") -> LanguageModelReranker:
    backbone, spec = converted
    return LanguageModelReranker(
        TaskBuilder(EVIDENCE, SCALE, 2),
        PromptBuilder(template(), ITEMS, backbone.tokenizer, 400),
        backbone,
        spec if mode == "block" else None,
        DecodeOptions(mode, max_new_tokens=24, batch_size=3),  # type: ignore[arg-type]
    )


def test_orders_of_rows_of_every_kind(
    converted: tuple[Backbone, BlockDiffusionSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ScriptedDecoder(converted[0].tokenizer, 4)
    monkeypatch.setattr("recbole_dgr2.pipeline.reranker.decode", script)
    found = reranker(converted).rerank(LISTS, HISTORIES)
    assert [sorted(ranking.order) for ranking in found] == [[0, 1, 2, 3]] * 5
    assert found[1] == identity_ranking(4)
    assert len(script.seen) == 4  # the row without candidates is not decoded
    for ranking, request in zip([found[0], *found[2:]], script.seen, strict=True):
        named = [slot for slot in script.order(request.key) if slot < LISTS.n]
        if ranking.valid:
            assert list(ranking.order) == named
    short = [slot for slot in script.order(script.seen[1].key) if slot < 2]
    assert list(found[2].order) == [*short, 2, 3]
    assert "out_of_set" in found[2].failures
    assert found[4].order == (0, 1, 2, 3)


def test_no_rows(converted: tuple[Backbone, BlockDiffusionSpec]) -> None:
    assert reranker(converted).rerank(LISTS.take(slice(0, 0)), []) == []
    only_empty = LISTS.take(np.array([1]))
    assert reranker(converted).rerank(only_empty, HISTORIES[1:2]) == [identity_ranking(4)]


@pytest.mark.parametrize("mode", ["block", "autoregressive"])
def test_a_real_model_in_both_modes(converted: tuple[Backbone, BlockDiffusionSpec], mode: str) -> None:
    """An untrained model writes nonsense: every row keeps its order, and says that it could not be read."""
    model = reranker(converted, mode)
    tasks = model.tasks.build(LISTS.take(np.array([0, 3])), [HISTORIES[0], HISTORIES[3]])
    result = model.decode(model.requests(tasks))
    assert [completion.key for completion in result.completions] == [task.key for task in tasks]
    assert all(len(completion.token_ids) <= 24 for completion in result.completions)
    for ranking, text in zip(model.rankings(tasks, result), model.texts(result), strict=True):
        assert "<|eos|>" not in text
        assert ranking.order == (0, 1, 2, 3)
        assert not ranking.valid
    again = [ranking.order for ranking in model.rerank(LISTS, HISTORIES)]
    assert again == [(0, 1, 2, 3)] * 5
    alone = model.with_options(DecodeOptions(model.options.mode, max_new_tokens=24, batch_size=1))
    assert alone.texts(alone.decode(alone.requests(tasks))) == model.texts(result)
    assert not torch.is_grad_enabled() or all(p.grad is None for p in converted[0].model.parameters())


def test_an_autoregressive_checkpoint_cannot_decode_blocks(
    converted: tuple[Backbone, BlockDiffusionSpec],
) -> None:
    model = reranker(converted, "autoregressive").with_options(
        DecodeOptions("block", max_new_tokens=8, batch_size=1, block_size=8)
    )
    with pytest.raises(ValueError, match="conversion"):
        model.rerank(LISTS, HISTORIES)
