"""One row of the report for a language model: accuracy, validity, reasoning, and speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recbole_dgr2.decode.auto import forget, settle
from recbole_dgr2.decode.types import DecodeResult, Mode, Request
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import tasks_of
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.training import Setting
from recbole_dgr2.report.assessment import assess_reranker
from recbole_dgr2.report.faithfulness import Case, measure_faithfulness
from recbole_dgr2.report.tables import Decode, Row
from recbole_dgr2.report.throughput import NothingTimedError, Throughput, measure
from recbole_dgr2.system import processes

logger = logging.getLogger(__name__)


def assess(setting: Setting, name: str, model: tuple[Backbone, BlockDiffusionSpec | None], mode: Mode) -> Row:
    """One row of the report: accuracy, validity, and speed at batch 1 against the same weights decoded AR."""
    (backbone, spec), config, test = model, setting.config, setting.test
    forget(backbone.model)  # an earlier stage had other weights in it
    options = views.decode_options(config, mode)
    reranker = LanguageModelReranker(setting.grounding.final, setting.prompts, backbone, spec, options)

    answers: dict[int, Case] = {}

    def rank_rows(rows: np.ndarray) -> Sequence[Any]:
        tasks = tasks_of(setting.grounding.final, test, rows)
        requests = reranker.requests(tasks)
        completions = processes.spread(requests, lambda part: reranker.decode(part).completions)
        result = DecodeResult(tuple(completions), 0.0, 0.0)  # its seconds are not read
        prompts = [str(backbone.tokenizer.decode(request.prompt_ids)) for request in requests]
        cases = map(Case, tasks, prompts, reranker.texts(result))
        answers.update(zip(rows.tolist(), cases, strict=True))
        return reranker.rankings(tasks, result)

    row = assess_reranker(name, setting.panel, rank_rows)
    sampled = [answers[number] for number in setting.panel.sample.tolist()]
    faithfulness = measure_faithfulness(
        sampled, setting.prompts.template, setting.panel.bootstrap_samples, setting.panel.seed
    )
    sample = setting.panel.sample[: config["speed_requests"]]
    alone = {
        kind: reranker.with_options(views.decode_options(config, kind, batch_size=1))
        for kind in dict.fromkeys(("autoregressive", mode))
    }
    requests = reranker.requests(tasks_of(setting.grounding.final, test, sample))
    decoders: dict[str, Callable[[Any], Any]] = {kind: one.decode for kind, one in alone.items()}
    speed = processes.from_main(lambda: _timed(name, decoders, requests, mode))
    rule = (options.tau, config["block_size"]) if mode in ("block", "speculative") else (None, None)
    decode = None if speed is None else Decode(mode, 1, speed, *rule)
    logger.info("%s: %s", name, _outline(row))
    return replace(row, decode=decode, faithfulness=faithfulness)


def _outline(row: Row) -> str:
    """Accuracy on hits and validity in a line: a long run tells how it stands before its report."""
    figures = [f"{metric} {row.hits[metric]:.4f}" for metric in ("recall@1", "ndcg@3") if metric in row.hits]
    rates = {"valid": row.validity and row.validity.rate, "copied": row.copied}
    return ", ".join([*figures, *(f"{key} {value:.4f}" for key, value in rates.items() if value is not None)])


def _timed(
    name: str, decoders: Mapping[str, Callable[[Any], Any]], requests: Sequence[Request], mode: Mode
) -> Throughput[Any] | None:
    """Speed in `mode`; None, with a warning, where answers are too short to have any. "auto" is timed, and its choice
    told, once it has made up its mind."""
    try:
        if mode == "auto":
            settle(decoders[mode], requests)
        speed = measure(decoders, requests, baseline="autoregressive")[mode]
        if mode == "auto":
            logger.info("%s, mode auto at batch 1: %s", name, speed.outcome.reason)
        return speed
    except NothingTimedError as error:
        logger.warning("%s: its speed is left out, %s", name, error)
        return None
