"""The stages of a run, in order: each trained or loaded, then assessed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from recbole_dgr2.config import Config
from recbole_dgr2.data.ranking import RankingJudge
from recbole_dgr2.decode.types import Request
from recbole_dgr2.model.adapters import merge
from recbole_dgr2.model.backbone import Backbone, start_mask_row
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import read_info, require_block_diffusion
from recbole_dgr2.pipeline import stage_views, views
from recbole_dgr2.pipeline.adapting import adapted, teacher_of
from recbole_dgr2.pipeline.assessing import assess
from recbole_dgr2.pipeline.mid_training import mid_train
from recbole_dgr2.pipeline.preparation import draw_lists, tasks_of
from recbole_dgr2.pipeline.stage_order import PARENTS, TEACHER, TEACHER_RL, ancestor_teacher, start_folder
from recbole_dgr2.pipeline.training import Setting, added_tokens, sid_tokens
from recbole_dgr2.report.tables import Row
from recbole_dgr2.trainer import ARTeacher, Conversion, Distillation, Reinforcement, TeacherRL, convert
from recbole_dgr2.trainer.graded import Practice
from recbole_dgr2.trainer.rollouts import Roller

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A language model on its way through the stages: its weights, the spec once it is converted, its last stage."""

    backbone: Backbone
    spec: BlockDiffusionSpec | None
    stage: str | None


def run_stages(setting: Setting, backbone: Backbone) -> list[Row]:
    """Train and assess the stages that the config names, in run order; `backbone` is what `make_setting` returned."""
    config, folder = setting.config, start_folder(setting.config)
    model = Model(backbone, None, None)
    if folder is not None:
        model = _started(config, backbone, folder)
    if config["block_size"] > config["max_new_tokens"]:
        logger.warning(
            "block_size %d is longer than an answer may be (max_new_tokens %d): slots after it are decoded for nothing",
            *(config["block_size"], config["max_new_tokens"]),
        )
    before = [
        stage for stage in PARENTS if stage not in config["stages"] and (setting.run.folder / stage).is_dir()
    ]
    if before:
        logger.info(
            "trained before, without a row in this report: %s; name them in stages too", ", ".join(before)
        )
    rows: list[Row] = []
    steps: dict[str, Callable[[Setting, Model], tuple[Model, list[Row]]]] = {
        TEACHER: _teach,
        "conversion": _convert,
        "distillation": _distil,
        "reinforcement": _reinforce,
    }
    for stage in PARENTS:
        if stage in config["stages"]:
            model, found = steps[stage](setting, model)
            rows += found
    return rows


def _started(config: Config, backbone: Backbone, folder: Path) -> Model:
    """A finished stage of an earlier run; ValueError where it was converted with another spec than the config's."""
    info = read_info(folder)
    if info.stage in (TEACHER, TEACHER_RL):
        return Model(backbone, None, info.stage)
    spec = require_block_diffusion(info, folder)
    spec.check(views.block_diffusion_spec(config, spec.mask_id))
    return Model(backbone, spec, info.stage)


def _assessed(setting: Setting, model: Model) -> Row:
    """A row of the report, decoded autoregressively before the conversion and by decode_mode after it."""
    with setting.run.phase("evaluation"):
        mode = views.answer_mode(setting.config, model.spec is not None)
        return assess(setting, str(model.stage), (model.backbone, model.spec), mode)


def _naive(setting: Setting, backbone: Backbone, spec: BlockDiffusionSpec) -> Row:
    """The row of converted weights before any training: in blocks, since any exact way gives the teacher's answers."""
    with setting.run.phase("evaluation"):
        return assess(setting, "naive", (backbone, spec), "block")


def _teach(setting: Setting, model: Model) -> tuple[Model, list[Row]]:
    """Stage `ar_teacher`: mid-training if asked for, supervised fine-tuning, reinforcement learning if asked for."""
    config, run, backbone = setting.config, setting.run, model.backbone
    if config["mid_training_epochs"]:
        with run.phase("mid_training"):
            mid_train(config, setting.data, backbone, setting.info, run.folder)
    with run.phase(TEACHER):
        told = {"traces": setting.traces} if setting.traces else {}
        stage = ARTeacher(backbone, views.stage_options(config, TEACHER), {**setting.info, **told})
        stage.fit([*setting.train, *setting.drills], setting.valid, run.folder / TEACHER)
    model = replace(model, stage=TEACHER)
    rows = [_assessed(setting, model)]
    if config["ar_teacher_rl_iterations"]:
        with run.phase(TEACHER_RL):
            train, valid, judge = _hits(setting, TEACHER_RL, config["ar_teacher_rl_conditional_bonus"])
            tuned = TeacherRL(
                Roller(backbone, None, stage_views.rollout_options(config, TEACHER_RL)),
                stage_views.policy_stage_options(config, TEACHER_RL),
                setting.info,
                Practice(judge),
                stage_views.policy_options(config, TEACHER_RL),
            )
            tuned.follow(run.folder / TEACHER)
            tuned.fit(train, valid, run.folder / TEACHER_RL)
        model = replace(model, stage=TEACHER_RL)
        rows.append(_assessed(setting, model))
    return model, rows


def _convert(setting: Setting, model: Model) -> tuple[Model, list[Row]]:
    """Stage `conversion`: assess the converted weights before any training, then train and assess again."""
    config, run = setting.config, setting.run
    plain, spec = convert(merge(model.backbone), config["block_size"], config["context"])
    rows = [_naive(setting, plain, spec)] if config["naive_row"] else []
    start_mask_row(plain, spec.mask_id)
    added = added_tokens(config, sid_tokens(config, setting.data))
    backbone = adapted(config, plain, run.folder / str(model.stage), added, spec.mask_id)
    with run.phase("conversion"):
        stage = Conversion(
            backbone,
            views.stage_options(config, "conversion"),
            setting.info,
            spec,
            views.noise_options(config),
            config["conversion_ar_weight"],
        )
        stage.follow(run.folder / str(model.stage))
        stage.fit(setting.train, setting.valid, run.folder / "conversion")
    model = Model(backbone, spec, "conversion")
    return model, [*rows, _assessed(setting, model)]


def _distil(setting: Setting, model: Model) -> tuple[Model, list[Row]]:
    """Stage `distillation`: the student learns on its own answers, from the frozen conversion or its ancestor."""
    config, run = setting.config, setting.run
    assert model.spec is not None
    start = run.folder / str(model.stage)
    teacher = start if stage_views.distillation_teacher(config) == "conversion" else ancestor_teacher(start)
    with run.phase("distillation"):
        stage = Distillation(
            Roller(model.backbone, model.spec, stage_views.rollout_options(config, "distillation")),
            views.stage_options(config, "distillation"),
            setting.info,
            teacher_of(model.backbone, model.spec, teacher),
            stage_views.distillation_options(config),
        )
        stage.follow(start)
        stage.fit(setting.train, setting.valid, run.folder / "distillation")
    model = replace(model, stage="distillation")
    return model, [_assessed(setting, model)]


def _reinforce(setting: Setting, model: Model) -> tuple[Model, list[Row]]:
    """Stage `reinforcement`: on training lists whose target is among the candidates."""
    config, run, name = setting.config, setting.run, "reinforcement"
    with run.phase(name):
        train, valid, judge = _hits(setting, name, conditional_bonus=True)
        stage = Reinforcement(
            Roller(model.backbone, model.spec, stage_views.rollout_options(config, name)),
            stage_views.policy_stage_options(config, name),
            setting.info,
            Practice(judge, setting.train),
            stage_views.policy_options(config, name),
            parent=str(model.stage),
        )
        stage.follow(run.folder / str(model.stage))
        stage.fit(train, valid, run.folder / name)
    model = replace(model, stage=name)
    return model, [_assessed(setting, model)]


def _hits(
    setting: Setting, stage: str, conditional_bonus: bool
) -> tuple[list[Request], list[Request], RankingJudge]:
    """Prompts of training and validation lists that hold their target, and their judge; targets are in no prompt."""
    config, grounding = setting.config, setting.grounding
    slots: dict[int, tuple[int, int]] = {}

    def prompts_of(phase: int, most: int) -> list[Request]:
        lists, builder = setting.learnt[phase], (grounding.training, grounding.final)[phase]
        rows = draw_lists(lists, most, config["seed"], hits_only=True)
        tasks = tasks_of(builder, lists, rows)
        found = zip(tasks, lists.slots[rows].tolist(), strict=True)
        slots.update({task.key: (slot, len(task.candidates)) for task, slot in found})
        return [Request(task.key, setting.prompts.build(task).token_ids) for task in tasks]

    train, valid = prompts_of(0, config["max_train_lists"]), prompts_of(1, config[f"{stage}_eval_lists"])
    if not train:
        raise ValueError(f"stage {stage}: no training list has its target among its candidates, expected one")
    return train, valid, RankingJudge(slots, conditional_bonus)
