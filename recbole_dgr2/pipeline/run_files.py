"""What a run leaves in its folder, so that it can be opened again without training anything.

    run.json         every option of the run and the fingerprint of the data set's files
    prompt.yaml      a copy of the prompt's template: the original may change, or stay behind when the run is moved
    grounding.json   bounds of the fact levels and the embedded reasoner
    conditional_logit.json   the same of the baseline, which has all facts and a penalty chosen on validation lists
    retriever/       checkpoint of the final retriever (a hard link into the cache where that is possible),
                     or a copy of the checkpoint or candidate file that was given
    <stage>/         language models, one folder a stage
    report.json, run.log
    ranks.json       rank of each hit's target under every system of the report, for paired tests

Nothing in it is unpickled but the retriever's checkpoint, which is read with an allow-list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recbole_dgr2.config import Config
from recbole_dgr2.data.evidence import FACTS, FactScale
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.system.files import read_json_object
from recbole_dgr2.system.paths import prompt_file

FORMAT = 1
RUN_FILE, RETRIEVER_FOLDER, PROMPT_FILE = "run.json", "retriever", "prompt.yaml"
RUN_KINDS = {"format": int, "dataset": str, "options": dict, "data": dict}
GROUNDING_KINDS = {"format": int, "facts": list, "n_levels": int, "edges": list, "reasoner": dict}
GROUNDING_FILE, LOGIT_FILE = "grounding.json", "conditional_logit.json"
REPORT_FILE = "report.json"


@dataclass(frozen=True)
class SavedRun:
    """The content of run.json."""

    dataset: str
    options: Mapping[str, Any]
    data: Mapping[str, str]


def write_run_file(folder: Path, config: Config, fingerprint: Mapping[str, str]) -> None:
    """Keep every option of a run, and its prompt: later defaults must not change what it means."""
    options = {key: config[key] for key in config.options} | config.given
    # RecBole appends the data set's name to data_path, and both replace text by objects
    options["data_path"] = str(Path(config["data_path"]).resolve().parent)
    options = {key: value for key, value in options.items() if key not in ("dataset", "model")}
    content = {"format": FORMAT, "dataset": config["dataset"], "options": options, "data": dict(fingerprint)}
    write_text(folder / RUN_FILE, json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n")
    prompt = prompt_file(config["prompt"])
    if prompt.resolve() != (folder / PROMPT_FILE).resolve():
        write_text(folder / PROMPT_FILE, prompt.read_bytes().decode("utf-8"))


def read_run_file(folder: Path) -> SavedRun:
    """What `write_run_file` wrote.

    Raises:
        FileNotFoundError, ValueError: no finished run in this folder, or one of another format.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder}: no {RUN_FILE} in it, expected the folder of a run of run_recbole_dgr2.py"
        )
    content = read_json_object(path, "run again", RUN_KINDS)
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path}: format {content['format']!r}, expected {FORMAT}; run again with this version"
        )
    return SavedRun(content["dataset"], content["options"], content["data"])


def write_grounding(path: Path, grounding: tuple[FactScale, Reasoner]) -> None:
    """Keep a scale of the facts and the reasoner that reads it."""
    scale, reasoner = grounding
    edges = [list(bounds) for bounds in scale.edges]
    content = {"format": FORMAT, "facts": FACTS, "n_levels": scale.n_levels, "edges": edges}
    write_text(path, json.dumps({**content, "reasoner": reasoner.to_dict()}, indent=1) + "\n")


def require_same_points(path: Path, points_per_unit: float) -> None:
    """ValueError where the grounding that a run's stages were trained on, if there is one, has other points."""
    if not path.is_file():
        return
    known = read_grounding(path)[1].points_per_unit
    if known != points_per_unit:
        raise ValueError(
            f"points_per_unit is {points_per_unit:g}, but the stages in {path.parent} were trained on scores of "
            f"{known:g}; set points_per_unit={known:g}, or train ar_teacher again"
        )


def read_grounding(path: Path) -> tuple[FactScale, Reasoner]:
    """What `write_grounding` wrote; FileNotFoundError or ValueError where it is not there or not of these facts."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; the run had no training lists with a hit")
    content = read_json_object(path, "run again", GROUNDING_KINDS)
    if content["format"] != FORMAT or tuple(content["facts"]) != FACTS:
        raise ValueError(f"{path}: written by another version (facts {content['facts']}); run again")
    scale = FactScale(content["n_levels"], tuple(tuple(bounds) for bounds in content["edges"]))
    try:
        return scale, Reasoner.from_dict(content["reasoner"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}; run again") from error
