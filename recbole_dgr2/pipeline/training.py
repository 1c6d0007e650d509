"""What the stages of a run are made from: lessons and language model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from recbole_dgr2.config import Config
from recbole_dgr2.data.chat import end_with_turn
from recbole_dgr2.data.drills import write_drills
from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.lessons import Lesson, encode_lessons, lesson_texts
from recbole_dgr2.data.prompt import PromptBuilder, label
from recbole_dgr2.data.tasks import TaskBuilder
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.model.backbone import (
    Backbone,
    build_embedded,
    hide_progress_bars,
    load_backbone,
    train_tokenizer,
)
from recbole_dgr2.model.checkpoint import load_adapted, require_same_data
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.adapting import adapted, started
from recbole_dgr2.pipeline.mid_training import sid_corpus
from recbole_dgr2.pipeline.preparation import Data, Grounding, Lists, tasks_of
from recbole_dgr2.pipeline.run import Run
from recbole_dgr2.pipeline.stage_order import start_folder
from recbole_dgr2.pipeline.tracing import Scribe
from recbole_dgr2.report.assessment import Panel
from recbole_dgr2.report.trimming import count_trimmed
from recbole_dgr2.system import processes
from recbole_dgr2.system.cache import digest_of
from recbole_dgr2.system.paths import prompt_file
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
    parts, entries = processes.from_main(lambda: _write(config, run, texts, grounding, (train, valid)))
    info = data_info(config, data, grounding.final)
    corpus = chain(lesson_texts(parts[0][:CORPUS_LISTS], template, data.item_text), sid_corpus(config, data))
    backbone = _backbone(config, info, corpus, sid_tokens(config, data))
    end_with_turn(template, backbone.tokenizer)
    prompts = prompt_builder(config, data, template, backbone)
    examples = [encode_lessons(part, prompts, backbone.tokenizer, backbone.eos_id) for part in parts]
    _check_length(examples[0], config["max_new_tokens"])
    drills = _drills(config, parts[0], grounding, template, backbone)
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
        entries,
    ), backbone


def _drills(
    config: Config,
    lessons: Sequence[Lesson],
    grounding: Grounding,
    template: PromptTemplate,
    backbone: Backbone,
) -> Sequence[Example]:
    """Practice lists with made-up scores that are spread as those of full lists; none where no list is full."""
    scores = [grounding.reasoner.scores(lesson.task.levels) for lesson in lessons if _full(lesson, config)]
    if not config["n_drills"]:
        return ()
    if not scores:
        text = "n_drills %d: no training list has all %d candidates to take scores from, so no drills are written"
        logger.warning(text, config["n_drills"], config["n_candidates"])
        return ()
    return write_drills(np.stack(scores), template, backbone.tokenizer, config["n_drills"], config["seed"])


def _write(
    config: Config,
    run: Run,
    texts: tuple[Data, PromptTemplate],
    grounding: Grounding,
    learnt: tuple[Lists, Lists],
) -> tuple[list[list[Lesson]], list[dict[str, Any]]]:
    """Lessons of training and of validation, and what their traces cost."""
    scribe = Scribe(config, texts, grounding.reasoner, run)
    lessons = [
        scribe.write("training", grounding.training, learnt[0], config["max_train_lists"]),
        scribe.write("validation", grounding.final, learnt[1], VALIDATION_LISTS),
    ]
    return lessons, scribe.entries


def _full(lesson: Lesson, config: Config) -> bool:
    """Whether a lesson's list has all N candidates."""
    return len(lesson.task.candidates) == config["n_candidates"]


def data_info(config: Config, data: Data, tasks: TaskBuilder) -> dict[str, Any]:
    """What a stage was trained on, as far as it must be the same wherever its checkpoint is used: all that the words of
    its prompts come from."""
    limits, scale, text = views.token_limits(config), tasks.scale, data.item_text
    return {
        "vocabulary": vocabulary(data.dataset).fingerprint,
        "n_candidates": config["n_candidates"],
        "prompt": hashlib.sha256(prompt_file(config["prompt"]).read_bytes()).hexdigest(),
        "facts": list(tasks.fact_names),
        "fact_levels": scale.n_levels,
        "fact_scale": digest_of(scale.edges),
        "history_length": tasks.history_length,
        "candidate_tokens": limits.candidate,
        "history_tokens": limits.history,
        "item_text": digest_of([text.titles, text.categories, text.brands]),
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


def added_tokens(config: Config, sids: Sequence[str]) -> list[str]:
    """Tokens that a pretrained backbone does not have: labels of candidates, then those of semantic IDs."""
    return [*(label(slot) for slot in range(config["n_candidates"])), *sids]


def _backbone(
    config: Config, info: Mapping[str, Any], corpus: Iterable[str], sids: Sequence[str]
) -> Backbone:
    """An untrained language model; or, where no teacher is to be trained, the finished stage that the first of `stages`
    starts from, checked to be of the same data.

    `sids`: tokens added beside the labels of candidates, and beside embedded_vocab_size.
    """
    start, added = start_folder(config), added_tokens(config, sids)
    if start is not None:
        backbone, found = load_adapted(start)
        require_same_data(found, start, info)
        return started(config, backbone, found, start, added)
    if config["backbone"] != "embedded":
        return adapted(config, load_backbone(config["backbone"], added), config["backbone"], added)
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
