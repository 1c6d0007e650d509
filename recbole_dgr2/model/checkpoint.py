"""What a stage leaves behind and the next one starts from: a Hugging Face folder plus one JSON, `dgr2.json`.

Weights are safetensors only and nothing of a file is ever run. A folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recbole_dgr2.model.backbone import Backbone, check_mask_id, read_pretrained
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.support import require_folder

INFO_FILE = "dgr2.json"
FORMAT = 1


@dataclass(frozen=True)
class StageInfo:
    """Where a checkpoint comes from.

    stage: its name, such as "ar_teacher". parent: folder or name it started from. block_diffusion: the spec
    it was converted with, None for an autoregressive model. data: JSON values that tie it to a data set
    (vocabulary fingerprint, number of candidates, prompt hash). seed: of the stage.
    """

    stage: str
    parent: str | None
    block_diffusion: BlockDiffusionSpec | None
    data: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        spec = self.block_diffusion
        return {
            "format": FORMAT,
            "stage": self.stage,
            "parent": self.parent,
            "block_diffusion": None if spec is None else spec.to_dict(),
            "data": self.data,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StageInfo:
        """Inverse of `to_dict`; ValueError for another format or a missing, unknown or ill-typed field."""
        if values.get("format") != FORMAT:
            raise ValueError(f"format {values.get('format')!r}, expected {FORMAT}")
        kinds: dict[str, tuple[type, ...]] = {
            "stage": (str,),
            "parent": (str, type(None)),
            "block_diffusion": (dict, type(None)),
            "data": (dict,),
            "seed": (int,),
        }
        wrong = sorted((set(values) ^ set(kinds)) - {"format"})
        wrong += [
            name for name, kind in kinds.items() if name in values and not isinstance(values[name], kind)
        ]
        if wrong:
            raise ValueError(f"fields {wrong} are missing, unknown or of another type")
        spec = values["block_diffusion"]
        return cls(
            stage=values["stage"],
            parent=values["parent"],
            block_diffusion=None if spec is None else BlockDiffusionSpec.from_dict(spec),
            data=values["data"],
            seed=values["seed"],
        )


def save_stage(folder: Path, backbone: Backbone, info: StageInfo) -> None:
    """Write weights (safetensors), tokenizer and `dgr2.json`, whole or not at all; an old folder is replaced.

    Everything is written to a temporary folder beside it and renamed, so a crash leaves the old state.
    ValueError: adapters that are not merged, a mask id that is no free embedding row.
    """
    if hasattr(backbone.model, "get_base_model"):
        raise ValueError(
            f"{folder}: the model still has adapters; merge them (merge_and_unload) before it is saved"
        )
    if info.block_diffusion is not None:
        check_mask_id(backbone, info.block_diffusion.mask_id)
    text = json.dumps(info.to_dict(), indent=2, sort_keys=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = fresh.with_name(f"{fresh.name}.old")
    try:
        backbone.model.save_pretrained(fresh)
        backbone.tokenizer.save_pretrained(fresh)
        (fresh / INFO_FILE).write_text(text + "\n", encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        fresh.chmod(0o777 & ~umask)  # mkdtemp makes it private
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def read_info(folder: Path) -> StageInfo:
    """`dgr2.json` of a stage's folder; ValueError with the cure where it is missing or not ours."""
    require_folder(str(folder))
    path = Path(folder) / INFO_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: not the folder of a finished stage; give one, or run the stage again"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        return StageInfo.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); run the stage again") from error


def load_stage(folder: Path) -> tuple[Backbone, StageInfo]:
    """What `save_stage` wrote, in its own dtype; ValueError for a missing or damaged folder."""
    info = read_info(folder)
    if not list(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{folder}: no *.safetensors in it (pickled weights are never loaded); run the stage again"
        )
    backbone = read_pretrained(folder)
    if info.block_diffusion is not None:
        try:
            check_mask_id(backbone, info.block_diffusion.mask_id)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    return backbone, info


def require_block_diffusion(info: StageInfo, folder: Path) -> BlockDiffusionSpec:
    """The spec of a converted checkpoint; for an autoregressive one ValueError names the conversion."""
    if info.block_diffusion is None:
        raise ValueError(
            f"{folder} holds an autoregressive model (stage {info.stage!r}): block decoding needs a converted "
            "one; run the 'conversion' stage on it"
        )
    return info.block_diffusion


def require_same_data(info: StageInfo, folder: Path, expected: Mapping[str, Any]) -> None:
    """ValueError naming the first entry of `data` in which the checkpoint differs from the data set at hand.

    expected: the entries that must agree, such as {"vocabulary": fingerprint, "n_candidates": 10}.
    """
    for name, value in expected.items():
        if info.data.get(name) != value:
            raise ValueError(
                f"{folder} was trained on other data: its {name} is {info.data.get(name)!r}, here {value!r}; "
                "use the data set and options it was trained with, or train again"
            )
