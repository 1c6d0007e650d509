"""What the stages of a run are made from: lessons and language model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from recbole_dgr2 import views
from recbole_dgr2.config import Config
from recbole_dgr2.data.chat import end_with_turn
from recbole_dgr2.data.drills import write_drills
from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.lessons import Lesson, encode_lessons, lesson_texts
from recbole_dgr2.data.prompt import PromptBuilder, label
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.mid_training import sid_corpus
from recbole_dgr2.model.backbone import (
    Backbone,
    build_embedded,
    hide_progress_bars,
    load_backbone,
    train_tokenizer,
)
from recbole_dgr2.model.checkpoint import load_stage, require_same_data
from recbole_dgr2.paths import prompt_file
from recbole_dgr2.preparation import Data, Grounding, Lists, tasks_of
from recbole_dgr2.report.assessment import Panel
from recbole_dgr2.report.trimming import count_trimmed
from recbole_dgr2.run import Run
from recbole_dgr2.stage_order import start_folder
from recbole_dgr2.tracing import Scribe
from recbole_dgr2.utils import vocabulary

VALIDATION_LISTS = 128
"""Validation lists on which a stage's loss is watched."""
CORPUS_LISTS = 2000
"""Training lists whose text the embedded tokenizer is trained on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """What all stages and all rows of the report share."""

    config: Config
    run: Run
    data: Data
    grounding: Grounding
    learnt: tuple[Lists, Lists]
    """Lists of training and validation."""
    test: Lists
    panel: Panel
    train: Sequence[Example]
    drills: Sequence[Example]
    valid: Sequence[Example]
    prompts: PromptBuilder
    info: Mapping[str, Any]
    trimmed: Sequence[Mapping[str, Any]]
    traces: Sequence[Mapping[str, Any]]
    """What the traces cost, by phase; empty where all are the reasoner's own."""


def make_setting(
    config: Config,
    run: Run,
    texts: tuple[Data, PromptTemplate],
    grounding: Grounding,
    phases: tuple[Lists, Lists, Lists],
    panel: Panel,
) -> tuple[Setting, Backbone]:
    """Write the traces, build or load the backbone, and encode the lessons with its tokenizer.

    Args:
        config, run: the run.
        texts: items and prompt in words.
        grounding: facts and reasoner.
        phases: training, validation and test lists.
        panel: users of the report.
    """
    hide_progress_bars()
    (data, template), (train, valid, test) = texts, phases
    scribe = Scribe(config, texts, grounding.reasoner, run)
    parts = [
        scribe.write("training", grounding.training, train, config["max_train_lists"]),
        scribe.write("validation", grounding.final, valid, VALIDATION_LISTS),
    ]
    info = data_info(config, data, grounding.final.fact_names)
    corpus = chain(lesson_texts(parts[0][:CORPUS_LISTS], template, data.item_text), sid_corpus(config, data))
    backbone = _backbone(config, info, corpus, sid_tokens(config, data))
    end_with_turn(template, backbone.tokenizer)
    prompts = prompt_builder(config, data, template, backbone)
    examples = [encode_lessons(part, prompts, backbone.tokenizer, backbone.eos_id) for part in parts]
    _check_length(examples[0], config["max_new_tokens"])
    scores = np.stack(
        [grounding.reasoner.scores(lesson.task.levels) for lesson in parts[0] if _full(lesson, config)]
    )
    drills = write_drills(scores, template, backbone.tokenizer, config["n_drills"], config["seed"])
    tested = tasks_of(grounding.final, test, np.union1d(panel.hits, panel.sample))
    trimmed = [
        count_trimmed("training", (prompts.build(lesson.task) for lesson in parts[0])),
        count_trimmed("test", map(prompts.build, tested)),
    ]
    learnt, (lessons, watched) = (train, valid), examples
    return Setting(
        config,
        run,
        data,
        grounding,
        learnt,
        test,
        panel,
        lessons,
        drills,
        watched,
        prompts,
        info,
        trimmed,
        scribe.entries,
    ), backbone


def _full(lesson: Lesson, config: Config) -> bool:
    """Whether a lesson's list has all N candidates."""
    return len(lesson.task.candidates) == config["n_candidates"]


def data_info(config: Config, data: Data, fact_names: Sequence[str]) -> dict[str, Any]:
    """What a stage was trained on, as far as it must be the same wherever its checkpoint is used."""
    return {
        "vocabulary": vocabulary(data.dataset).fingerprint,
        "n_candidates": config["n_candidates"],
        "prompt": hashlib.sha256(prompt_file(config["prompt"]).read_bytes()).hexdigest(),
        "facts": list(fact_names),
        **({"semantic_ids": data.sids.digest} if data.sids else {}),
    }


def prompt_builder(config: Config, data: Data, template: PromptTemplate, backbone: Backbone) -> PromptBuilder:
    """Prompts of a run, within the backbone's positions and the run's own budgets."""
    room, limits = backbone_room(config, backbone), views.token_limits(config)
    return PromptBuilder(template, data.item_text, backbone.tokenizer, room, limits)


def backbone_room(config: Config, backbone: Backbone) -> int:
    """Tokens that a prompt may have: the backbone's positions without those of the answer and of one block."""
    return int(
        backbone.model.config.max_position_embeddings - config["max_new_tokens"] - config["block_size"]
    )


def sid_tokens(config: Config, data: Data) -> list[str]:
    """Tokens of the semantic IDs, none without; ValueError where one is the label of a candidate as well."""
    tokens = data.sids.added_tokens() if data.sids else []
    for shared in {label(slot) for slot in range(config["n_candidates"])}.intersection(tokens):
        raise ValueError(
            f"semantic_ids {config['semantic_ids']}: {shared!r} is also the label of a candidate; spell the tokens "
            "otherwise, such as <a_12>"
        )
    return tokens


def _backbone(
    config: Config, info: Mapping[str, Any], corpus: Iterable[str], sids: Sequence[str]
) -> Backbone:
    """An untrained language model; or, where no teacher is to be trained, the finished stage that the first of `stages`
    starts from, checked to be of the same data.

    `sids`: tokens added beside the labels of candidates, and beside embedded_vocab_size.
    """
    start = start_folder(config)
    if start is not None:
        backbone, found = load_stage(start)
        require_same_data(found, start, info)
        return backbone
    added = [*(label(slot) for slot in range(config["n_candidates"])), *sids]
    if config["backbone"] != "embedded":
        return load_backbone(config["backbone"], added)
    tokenizer = train_tokenizer(corpus, config["embedded_vocab_size"] + len(sids), added)
    return build_embedded(views.embedded_spec(config), tokenizer, config["seed"])


def _check_length(examples: Sequence[Example], limit: int) -> None:
    longest = max((len(example.response_ids) for example in examples), default=0)
    if longest > limit:
        logger.warning(
            "max_new_tokens %d: traces have up to %d tokens, so answers will be cut off; raise it",
            limit,
            longest,
        )
