"""Training stages, in run order. Each is a class on the loop of `stage`; they meet only in their folders."""

from typing import Any

from recbole_dgr2.trainer.ar_teacher import ARTeacher
from recbole_dgr2.trainer.conversion import Conversion, convert
from recbole_dgr2.trainer.distillation import Distillation
from recbole_dgr2.trainer.mid_training import MidTraining
from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.reinforcement import Reinforcement
from recbole_dgr2.trainer.stage import Stage
from recbole_dgr2.trainer.teacher_rl import TeacherRL

_IN_ORDER = (MidTraining, ARTeacher, TeacherRL, Conversion, Distillation, Reinforcement)
STAGES: dict[str, type[Stage[Any]]] = {stage.name: stage for stage in _IN_ORDER}

__all__ = [
    "STAGES",
    "ARTeacher",
    "Conversion",
    "Distillation",
    "MidTraining",
    "Reinforcement",
    "Stage",
    "StageOptions",
    "TeacherRL",
    "convert",
]
