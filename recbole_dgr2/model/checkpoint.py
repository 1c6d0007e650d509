"""What a stage leaves behind and the next one starts from: a Hugging Face folder plus one JSON, `dgr2.json`.

Weights are safetensors only and nothing of a file is ever run. A folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recbole_dgr2.model.adapters import (
    Adapted,
    Base,
    fill_adapter,
    merge,
    read_adapter,
    weights_digest,
    write_adapter,
)
from recbole_dgr2.model.backbone import Backbone, check_mask_id, grow_rows, read_pretrained
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.support import require_folder
from recbole_dgr2.system.files import read_json_object

INFO_FILE = "dgr2.json"
FORMAT = 1


@dataclass(frozen=True)
class StageInfo:
    """Where a checkpoint comes from.

    stage: its name, such as "ar_teacher". parent: folder or name it started from. block_diffusion: the spec
    it was converted with, None for an autoregressive model. data: JSON values that tie it to a data set
    (vocabulary fingerprint, number of candidates, prompt hash). seed: of the stage. base: what the adapter in the
    folder lies over, None where the folder holds all weights. parent_weights: digest of the parent's weights
    (`weights_digest`), None where there was no folder of them. weights: that of the folder's own, which `save_stage`
    notes; it tells whether a folder is as it was saved, and nothing of the stage.
    """

    stage: str
    parent: str | None
    block_diffusion: BlockDiffusionSpec | None
    data: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    base: Base | None = None
    parent_weights: str | None = None
    weights: str | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        spec = self.block_diffusion
        more: dict[str, Any] = {} if self.base is None else {"base": asdict(self.base)}
        if self.parent_weights is not None:
            more["parent_weights"] = self.parent_weights
        if self.weights is not None:
            more["weights"] = self.weights
        return {
            "format": FORMAT,
            "stage": self.stage,
            "parent": self.parent,
            "block_diffusion": None if spec is None else spec.to_dict(),
            "data": self.data,
            "seed": self.seed,
            **more,
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
        optional: dict[str, tuple[type, ...]] = {"base": (dict,), "parent_weights": (str,), "weights": (str,)}
        kinds |= {name: kind for name, kind in optional.items() if name in values}
        wrong = sorted((set(values) ^ set(kinds)) - {"format"})
        wrong += [
            name for name, kind in kinds.items() if name in values and not isinstance(values[name], kind)
        ]
        if wrong:
            raise ValueError(f"fields {wrong} are missing, unknown or of another type")
        spec, base = values["block_diffusion"], values.get("base")
        if base is not None and set(base) != {each.name for each in fields(Base)}:
            raise ValueError(f"base has {sorted(base)}, expected {[each.name for each in fields(Base)]}")
        return cls(
            stage=values["stage"],
            parent=values["parent"],
            block_diffusion=None if spec is None else BlockDiffusionSpec.from_dict(spec),
            data=values["data"],
            seed=values["seed"],
            base=None if base is None else Base(**base),
            parent_weights=values.get("parent_weights"),
            weights=values.get("weights"),
        )


def save_stage(folder: Path, backbone: Backbone, info: StageInfo) -> None:
    """Write weights (safetensors), tokenizer and `dgr2.json`, whole or not at all; an old folder is replaced.

    Of an adapted backbone the adapter alone is written (peft's format), its base by reference: relative where it lies
    beside the folder, so that a run can be moved. Everything is written to a temporary folder beside it and renamed,
    so a crash leaves the old state. ValueError: adapters of unknown base, a mask id that is no free embedding row.
    """
    adapted = backbone if isinstance(backbone, Adapted) else None
    if adapted is None and hasattr(backbone.model, "get_base_model"):
        raise ValueError(
            f"{folder}: the model still has adapters; merge them (merge_and_unload) before it is saved"
        )
    if adapted is not None:
        info = replace(info, base=replace(adapted.base, source=_near(adapted.base.source, folder)))
    if info.block_diffusion is not None:
        check_mask_id(backbone, info.block_diffusion.mask_id)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    for left in (fresh, old):  # by a run that was killed here
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir()
    try:
        if adapted is not None and info.base is not None:
            write_adapter(fresh, adapted, info.base.source)
        else:
            backbone.model.save_pretrained(fresh)
        backbone.tokenizer.save_pretrained(fresh)
        noted = replace(info, weights=weights_digest(fresh)).to_dict()
        text = json.dumps(noted, indent=2, sort_keys=True)
        (fresh / INFO_FILE).write_text(text + "\n", encoding="utf-8")
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
    values = read_json_object(path, "run the stage again")
    try:
        return StageInfo.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); run the stage again") from error


def load_stage(folder: Path) -> tuple[Backbone, StageInfo]:
    """What `save_stage` wrote, in its own dtype, an adapter merged; ValueError for a missing or damaged folder."""
    backbone, info = load_adapted(folder)
    return merge(backbone), info


def load_adapted(folder: Path) -> tuple[Backbone, StageInfo]:
    """As `load_stage`, but an adapter stays apart from its base: an `Adapted`, which can be trained on.

    ValueError: a folder that is missing or damaged, or a base that has changed since.
    """
    info = read_info(folder)
    if not list(Path(folder).glob("*.safetensors")):
        raise ValueError(
            f"{folder}: no *.safetensors in it (pickled weights are never loaded); run the stage again"
        )
    if info.weights is not None and info.weights != weights_digest(folder):
        raise ValueError(
            f"{folder}: its weights are not those that were saved; put them back, or run the stage again"
        )
    backbone = read_pretrained(folder) if info.base is None else _over_base(Path(folder), info.base)
    if info.block_diffusion is not None:
        try:
            check_mask_id(backbone, info.block_diffusion.mask_id)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    return backbone, info


def restore_stage(folder: Path, backbone: Backbone) -> None:
    """Give a backbone the weights in a stage's folder, in place; of an adapted one the adapter alone is read."""
    if isinstance(backbone, Adapted):
        fill_adapter(Path(folder), backbone)
    else:
        backbone.model.load_state_dict(load_stage(folder)[0].model.state_dict())


def _over_base(folder: Path, base: Base) -> Adapted:
    source = os.path.normpath(folder.resolve() / base.source) if base.source.startswith("..") else base.source
    cure = "put it back, or run the stage again"
    try:
        digest = weights_digest(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: its adapter lies over {source}, which is not there; {cure}") from error
    if digest != base.digest:
        raise ValueError(f"{folder}: its adapter lies over {source}, whose weights are others now; {cure}")
    if (Path(source) / INFO_FILE).is_file():
        below = load_stage(Path(source))[0]
    else:
        below = read_pretrained(source, base.dtype)
    tokenizer = type(below.tokenizer).from_pretrained(folder)
    whole = Backbone(below.model, tokenizer)
    grow_rows(whole, base.rows)
    return read_adapter(folder, whole, replace(base, source=source))


def _near(source: str, folder: Path) -> str:
    """A base beside the stage's folder relative to it; any other as it is."""
    if Path(source).is_dir() and Path(source).parent == folder.resolve().parent:
        return os.path.relpath(source, folder.resolve())
    return source


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
