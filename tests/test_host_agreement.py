"""The re-ranker inside RecBole gives the report's figures, and nothing of a target reaches a prompt."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recbole.data.interaction import Interaction

from recbole_dgr2.data.prompt import PromptBuilder
from recbole_dgr2.model.dgr2 import DGR2
from recbole_dgr2.pipeline.preparation import make_lists, tasks_of
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.sources import RetrieverSource
from recbole_dgr2.pipeline.views import candidate_options, decode_options
from recbole_dgr2.report.assessment import assess_reranker
from recbole_dgr2.report.evaluation import standard_metrics
from recbole_dgr2.system.cache import Cache
from recbole_dgr2.utils import build_trainer, load_dataset, split_loaders
from tests.reranking import ScriptedDecoder, template
from tests.toy_run import Finished


def scripted(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> tuple[LanguageModelReranker, ScriptedDecoder]:
    """The re-ranker with a prompt that shows every title, and with answers that move candidates about."""
    setting, tokenizer = finished.setting, finished.backbone.tokenizer
    script = ScriptedDecoder(tokenizer, 6)
    monkeypatch.setattr("recbole_dgr2.pipeline.reranker.decode", script)
    options = decode_options(setting.config, "autoregressive")
    prompts = PromptBuilder(template(), setting.data.item_text, tokenizer, 10_000)
    return LanguageModelReranker(setting.grounding.final, prompts, finished.backbone, None, options), script


def test_recboles_trainer_and_the_report_agree(
    finished: Finished, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reranker, _ = scripted(finished, monkeypatch)
    setting = finished.setting

    def rank_rows(rows: np.ndarray) -> list[Any]:
        tasks = tasks_of(setting.grounding.final, setting.test, rows)
        return reranker.rankings(tasks, reranker.decode(reranker.requests(tasks)))

    row = assess_reranker("x", setting.panel, rank_rows)
    config = copy.deepcopy(setting.config)
    config["checkpoint_dir"] = str(here)
    loaders = split_loaders(config, load_dataset(config))
    model = DGR2(config, loaders[0].dataset, finished.source.store.final(), reranker)
    trainer = build_trainer(config, model)
    trainer.eval_collector.data_collect(loaders[0])
    found = standard_metrics(trainer.evaluate(loaders[2], load_best_model=False))
    assert found == row.all_users
    assert found != finished.report["rows"][0]["all"]


def test_a_prompt_never_shows_the_target_of_a_batch(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    reranker, script = scripted(finished, monkeypatch)
    config = finished.setting.config
    loaders = split_loaders(config, load_dataset(config))
    model = DGR2(config, loaders[0].dataset, finished.source.store.final(), reranker)
    batch = next(iter(loaders[2]))[0]
    expected = model.full_sort_predict(batch)
    shown = list(script.seen)
    assert len(shown) == len(batch) == 60
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        changed = dict(batch.interaction)
        for name in ("item_id", "title", "rating", "timestamp"):
            changed[name] = torch.randint(1, 81, (len(batch),), generator=generator)
        script.seen.clear()
        assert torch.equal(model.full_sort_predict(Interaction(changed)), expected)
        assert script.seen == shown


def test_a_prompt_never_shows_the_target_of_the_data(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other test items in the data set itself change no prompt, and a target is shown as a candidate or not at all."""
    reranker, _ = scripted(finished, monkeypatch)
    setting, rng = finished.setting, np.random.default_rng(0)
    sequences = setting.data.sequences
    items = sequences.items.copy()
    last = sequences.offsets[2:] - 1
    items[last] = rng.integers(1, 81, size=len(last))
    other = replace(setting.data, sequences=replace(sequences, items=items))
    options = candidate_options(setting.config)
    prompts = []
    for data in (setting.data, other):
        source = RetrieverSource(
            finished.source.store, data.sequences, options, options.head(10), Cache(None)
        )
        lists = make_lists(data, source, "test", options.n)
        tasks = tasks_of(setting.grounding.final, lists, np.arange(60))
        prompts.append([request.prompt_ids for request in reranker.requests(tasks)])
        for task, ids, target in zip(tasks, prompts[-1], lists.targets.tolist(), strict=True):
            title = setting.data.item_text.titles[target] + " "
            if target not in (*task.candidates, *task.history):
                assert title not in finished.backbone.tokenizer.decode(ids)
    assert prompts[0] == prompts[1]
    assert not np.array_equal(items, sequences.items)
