"""Training stages, in run order. Each is a class on the loop of `stage`; they meet only in their folders."""

from typing import Any

from recbole_dgr2.trainer.ar_teacher import ARTeacher
from recbole_dgr2.trainer.conversion import Conversion, convert
from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.stage import Stage

STAGES: dict[str, type[Stage[Any]]] = {stage.name: stage for stage in (ARTeacher, Conversion)}

__all__ = ["STAGES", "ARTeacher", "Conversion", "Stage", "StageOptions", "convert"]
