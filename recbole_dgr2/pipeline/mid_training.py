"""The optional stage before the teacher: its lessons from a run's data, and its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recbole_dgr2.config import Config
from recbole_dgr2.data.sid_lessons import SidLesson, encode_sid_lessons, sid_lesson_texts, write_sid_lessons
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import Data
from recbole_dgr2.trainer import MidTraining

MID_TRAINING = "mid_training"
CORPUS_LESSONS = 4000
"""Lessons whose text the embedded tokenizer is trained on."""


def sid_lessons(config: Config, data: Data) -> list[SidLesson]:
    """The lessons of a run; none without mid-training.

    Raises:
        ValueError: mid-training without semantic IDs.
    """
    if not config["mid_training_epochs"]:
        return []
    options = views.candidate_options(config)
    most = config["mid_training_examples"]
    return write_sid_lessons(data.item_text, data.sequences, options.split.last_m, most, config["seed"])


def sid_corpus(config: Config, data: Data) -> Iterator[str]:
    """Texts of lessons, evenly chosen, for the tokenizer that is trained on the data set's text."""
    lessons = sid_lessons(config, data)
    return sid_lesson_texts(lessons[:: -(-len(lessons) // CORPUS_LESSONS) or 1])


def mid_train(config: Config, data: Data, backbone: Backbone, info: Mapping[str, Any], folder: Path) -> None:
    """Train `backbone` on semantic IDs, resume that, or load what is finished; `folder` is the run's.

    Does nothing where mid_training_epochs is 0.
    """
    if lessons := sid_lessons(config, data):
        stage = MidTraining(backbone, views.mid_training_options(config), info)
        stage.fit(encode_sid_lessons(lessons, backbone.tokenizer), [], folder / MID_TRAINING)
