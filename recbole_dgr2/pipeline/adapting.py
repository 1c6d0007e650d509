"""Where a run puts adapters: over the pretrained backbone up to the conversion, then over the merged teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recbole_dgr2.config import Config
from recbole_dgr2.model.adapters import Adapted, Base, adapt, merge
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, load_stage
from recbole_dgr2.pipeline import views
from recbole_dgr2.trainer.teacher import BaseTeacher, Score, frozen_teacher


def adapted(
    config: Config, backbone: Backbone, source: str | Path, added: Sequence[str], mask_id: int | None = None
) -> Backbone:
    """The backbone under a fresh adapter, where lora_rank is above 0; else as it is.

    Args:
        config: the run.
        backbone: plain; changed in place.
        source: folder or name that it was loaded from, or a stage's folder that holds its weights.
        added: tokens that the backbone did not have; their rows are trained, as is that of the mask token.
        mask_id: the mask token, once there is one.
    """
    options = views.adapter_options(config)
    if options is None:
        return backbone
    ids = backbone.tokenizer.convert_tokens_to_ids(list(added))
    rows = ids if mask_id is None else [*ids, mask_id]
    return adapt(backbone, options, Base.of(source, backbone), rows, config["seed"])


def started(
    config: Config, backbone: Backbone, info: StageInfo, folder: Path, added: Sequence[str]
) -> Backbone:
    """What a finished stage hands to the next one: a student keeps its adapter, a teacher's is merged.

    Args:
        config: the run.
        backbone, info, folder: the finished stage.
        added: see `adapted`.

    Raises:
        ValueError: the student's adapter is of another size than the config's.
    """
    options = views.adapter_options(config)
    if options is None or info.block_diffusion is None:
        return merge(backbone)
    if not isinstance(backbone, Adapted):
        return adapted(config, backbone, folder, added, info.block_diffusion.mask_id)
    for name, targets in (("lora_rank", False), ("lora_alpha", False), ("lora_targets", True)):
        own, wanted = (getattr(each, name.removeprefix("lora_")) for each in (backbone.options, options))
        if own != wanted and not (targets and set(own) == set(wanted or own)):
            raise ValueError(
                f"{name} {wanted}: the adapter in {folder} has {own}; set that, or lora_rank 0 to train all weights"
            )
    return backbone


def teacher_of(student: Backbone, spec: BlockDiffusionSpec, folder: Path) -> Score:
    """The finished teacher in `folder`: the student without its adapter if that lies over it, else read again."""
    if isinstance(student, Adapted) and Path(student.base.source) == folder.resolve():
        return BaseTeacher(student)
    return frozen_teacher(load_stage(folder)[0], student, spec)
