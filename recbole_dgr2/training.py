"""The stages of a run: lessons and language model, each stage trained or loaded, then assessed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recbole_dgr2 import views
from recbole_dgr2.config import Config
from recbole_dgr2.data.drills import write_drills
from recbole_dgr2.data.examples import Example
from recbole_dgr2.data.lessons import Lesson, encode_lessons, lesson_texts, write_lessons
from recbole_dgr2.data.prompt import PromptBuilder, PromptTemplate, label
from recbole_dgr2.data.tasks import TaskBuilder
from recbole_dgr2.model.backbone import (
    Backbone,
    build_embedded,
    hide_progress_bars,
    load_backbone,
    train_tokenizer,
)
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import load_stage, require_same_data
from recbole_dgr2.paths import prompt_file
from recbole_dgr2.preparation import Data, Grounding, Lists, draw_lists, tasks_of
from recbole_dgr2.report.assessment import Panel, assess_reranker
from recbole_dgr2.report.tables import Decode, Row
from recbole_dgr2.report.throughput import measure
from recbole_dgr2.reranker import LanguageModelReranker
from recbole_dgr2.run import Run
from recbole_dgr2.trainer import ARTeacher, Conversion, convert
from recbole_dgr2.utils import vocabulary

TEACHER = "ar_teacher"
VALIDATION_LISTS = 128
"""Validation lists on which a stage's loss is watched."""
CORPUS_LISTS = 2000
"""Training lists whose text the embedded tokenizer is trained on."""

logger = logging.getLogger(__name__)

DecodeMode = Literal["autoregressive", "block"]


@dataclass(frozen=True)
class Setting:
    """What all stages and all rows of the report share."""

    config: Config
    run: Run
    data: Data
    grounding: Grounding
    test: Lists
    panel: Panel
    train: Sequence[Example]
    drills: Sequence[Example]
    valid: Sequence[Example]
    prompts: PromptBuilder
    info: Mapping[str, Any]


def require_teacher(options: views.RunOptions) -> None:
    """Raise ValueError where stages after the teacher are asked for and no earlier run has left one."""
    folder = options.run_dir / TEACHER
    if options.stages and TEACHER not in options.stages and not folder.is_dir():
        raise ValueError(
            f"stages {list(options.stages)}: they start from the teacher of an earlier run, and there is no {folder}; "
            "add ar_teacher to stages, or set run_dir to the folder of that run"
        )


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
    most, seed = config["max_train_lists"], config["seed"]

    def lessons(builder: TaskBuilder, lists: Lists, most: int) -> list[Lesson]:
        tasks = tasks_of(builder, lists, draw_lists(lists, most, seed))
        return write_lessons(tasks, grounding.reasoner, template, data.item_text)

    parts = [lessons(grounding.training, train, most), lessons(grounding.final, valid, VALIDATION_LISTS)]
    info = data_info(config, data, grounding.final.fact_names)
    corpus = lesson_texts(parts[0][:CORPUS_LISTS], template, data.item_text)
    backbone = _backbone(config, run.folder / TEACHER, info, corpus)
    prompts = PromptBuilder(template, data.item_text, backbone.tokenizer, backbone_room(config, backbone))
    examples = [encode_lessons(part, prompts, backbone.tokenizer, backbone.eos_id) for part in parts]
    _check_length(examples[0], config["max_new_tokens"])
    scores = np.stack(
        [grounding.reasoner.scores(lesson.task.levels) for lesson in parts[0] if _full(lesson, config)]
    )
    drills = write_drills(scores, template, backbone.tokenizer, config["n_drills"], seed)
    return Setting(
        config, run, data, grounding, test, panel, examples[0], drills, examples[1], prompts, info
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
    }


def backbone_room(config: Config, backbone: Backbone) -> int:
    """Tokens that a prompt may have: the backbone's positions without those of the answer and of one block."""
    return int(
        backbone.model.config.max_position_embeddings - config["max_new_tokens"] - config["block_size"]
    )


def _backbone(config: Config, teacher: Path, info: Mapping[str, Any], corpus: Iterable[str]) -> Backbone:
    """An untrained language model; the finished teacher, checked to be of the same data, if none is to be trained."""
    if TEACHER not in config["stages"]:
        backbone, found = load_stage(teacher)
        require_same_data(found, teacher, info)
        return backbone
    labels = [label(slot) for slot in range(config["n_candidates"])]
    if config["backbone"] != "embedded":
        return load_backbone(config["backbone"], labels)
    tokenizer = train_tokenizer(corpus, config["embedded_vocab_size"], labels)
    return build_embedded(views.embedded_spec(config), tokenizer, config["seed"])


def _check_length(examples: Sequence[Example], limit: int) -> None:
    longest = max((len(example.response_ids) for example in examples), default=0)
    if longest > limit:
        logger.warning(
            "max_new_tokens %d: traces have up to %d tokens, so answers will be cut off; raise it",
            limit,
            longest,
        )


def teach_and_assess(setting: Setting, backbone: Backbone) -> list[Row]:
    """Stage `ar_teacher`: train, and assess with autoregressive decoding."""
    config, run = setting.config, setting.run
    with run.phase("ar_teacher"):
        stage = ARTeacher(backbone, views.stage_options(config, "ar_teacher"), setting.info)
        stage.fit([*setting.train, *setting.drills], setting.valid, run.folder / "ar_teacher")
    with run.phase("evaluation"):
        return [_assess(setting, "ar_teacher", backbone, None, "autoregressive")]


def convert_and_assess(setting: Setting, backbone: Backbone) -> list[Row]:
    """Stage `conversion`: assess the converted weights before any training, then train and assess again."""
    config, run = setting.config, setting.run
    backbone, spec = convert(backbone, config["block_size"], config["context"])
    with run.phase("evaluation"):
        rows = [_assess(setting, "naive", backbone, spec, "block")]
    with run.phase("conversion"):
        stage = Conversion(
            backbone,
            views.stage_options(config, "conversion"),
            setting.info,
            spec,
            views.noise_options(config),
            config["conversion_ar_weight"],
        )
        stage.fit(setting.train, setting.valid, run.folder / "conversion")
    with run.phase("evaluation"):
        return [*rows, _assess(setting, "conversion", backbone, spec, "block")]


def _assess(
    setting: Setting, name: str, backbone: Backbone, spec: BlockDiffusionSpec | None, mode: DecodeMode
) -> Row:
    """One row of the report: accuracy, validity, and speed at batch 1 against the same weights decoded AR."""
    config, test = setting.config, setting.test
    options = views.decode_options(config, mode)
    reranker = LanguageModelReranker(setting.grounding.final, setting.prompts, backbone, spec, options)

    def rank_rows(rows: np.ndarray) -> Sequence[Any]:
        tasks = tasks_of(setting.grounding.final, test, rows)
        return reranker.rankings(tasks, reranker.decode(reranker.requests(tasks)))

    row = assess_reranker(name, setting.panel, rank_rows)
    sample = setting.panel.sample[: config["speed_requests"]]
    alone = {
        kind: reranker.with_options(views.decode_options(config, kind, batch_size=1))
        for kind in dict.fromkeys(("autoregressive", mode))
    }
    requests = reranker.requests(tasks_of(setting.grounding.final, test, sample))
    speed = measure({kind: one.decode for kind, one in alone.items()}, requests, baseline="autoregressive")[
        mode
    ]
    in_blocks = mode == "block"
    decode = Decode(
        mode, 1, speed, options.tau if in_blocks else None, options.block_size if in_blocks else None
    )
    return Row(row.name, row.all_users, row.hits, row.ci95, row.validity, decode)
