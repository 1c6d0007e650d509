"""Measure retrievers of RecBole on one data set under one protocol, and write what was found as JSON and Markdown.

python -m recbole_dgr2.benchmark --dataset=Amazon_Beauty --retrievers=Pop,ItemKNN,BPR --output=results/beauty.json

Every retriever is measured by RecBole's own evaluator on its test lists; hit share and floor are read off its best 10,
20 and 50 items. `--splits=ItemKNN,SASRec:last_m+leaky` measures the floor under candidate splits, and the second-stage
baselines on their lists. What the JSON file already holds of other retrievers and splits stays, so the command can be
run for one at a time; the page is written anew.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recbole_dgr2.config import Config, retriever_seed, split_arguments
from recbole_dgr2.data.parts import SPLITS
from recbole_dgr2.model.history import UserBoundError
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import (
    Data,
    Host,
    Lists,
    list_source,
    load_data,
    make_lists,
    report_counts,
)
from recbole_dgr2.pipeline.retrieval import RetrieverStore
from recbole_dgr2.pipeline.run import Run, hardware, library_versions
from recbole_dgr2.pipeline.study_file import is_study
from recbole_dgr2.report.benchmark_page import benchmark_page
from recbole_dgr2.report.floors import floor_of
from recbole_dgr2.schema import read_yaml
from recbole_dgr2.system.cache import Cache, data_fingerprint, write_text
from recbole_dgr2.system.command import Arguments, command, command_parser
from recbole_dgr2.system.files import read_json_object
from recbole_dgr2.system.paths import properties_dir
from recbole_dgr2.utils import recbole_metrics

WIDTHS = (10, 20, 50)
"""Candidates a list at which hit share and floor are read."""
SPLIT_WIDTH = 10
BOOTSTRAP = 2000
DECIDED = {
    "retriever": "name it in --retrievers or --splits",
    "candidate_split": "name it in --splits, as in --splits=SASRec:last_m+leaky",
    "candidate_file": "it measures retrievers",
    "n_candidates": f"lists of {max(WIDTHS)} for --retrievers, of {SPLIT_WIDTH} for --splits",
    "mask_history": "both ways are measured where they differ",
    "stages": "none is run",
    "run_dir": "every run has a folder of its own",
}
"""Keys that no command line may set, since figures would stand under a name that is not theirs, and what is done."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """One benchmark: its data set, the options given to every run, and the JSON file that collects what is found."""

    dataset: str
    given: Mapping[str, str]
    output: Path

    def config(self, retriever: str, **changes: Any) -> Config:
        """The run of one retriever with its hyper-parameters."""
        own = hyper_parameters(self.dataset).get(retriever, {})
        words = [f"--{key}={value}" for key, value in self.given.items()]
        keys = {"retriever": retriever, "stages": [], **own, **changes}
        return Config("DGR2", self.dataset, None, keys, words)

    def read(self) -> dict[str, Any]:
        """What was found so far."""
        if not self.output.is_file():
            return {"dataset": self.dataset, "retrievers": {}, "splits": {}}
        content = read_json_object(self.output, "give another --output", {"dataset": str, "retrievers": dict})
        if content["dataset"] != self.dataset:
            raise ValueError(f"{self.output}: holds {content['dataset']!r}, not {self.dataset!r}")
        return content

    def add(self, section: str, name: str, entry: Any) -> None:
        """Put one finding into the JSON file and write the page anew."""
        content = self.read()
        content.setdefault(section, {})[name] = entry
        content |= {"versions": library_versions(), "hardware": hardware()}
        write_text(self.output, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        self.write_page(content)

    def write_page(self, content: Mapping[str, Any]) -> None:
        """Write the page; it names the studies beside it: files of one, <output>_<anything>.json, that have a page."""
        others = sorted(self.output.parent.glob(f"{self.output.stem}_*.json"))
        pages = [(other, other.with_suffix(".md")) for other in others]
        studies = [page.name for other, page in pages if page.is_file() and is_study(other)]
        write_text(self.output.with_suffix(".md"), benchmark_page(content, studies))

    def add_splits(self, retriever: str, found: Mapping[str, Any]) -> None:
        """Put what was found under some splits beside what the JSON file holds of the retriever under others."""
        known = {**self.read().get("splits", {}).get(retriever, {}), **found}
        self.add("splits", retriever, {split: known[split] for split in SPLITS if split in known})


def given_options(words: Sequence[str]) -> dict[str, str]:
    """`--key=value` words for every run; ValueError for other words, and for a key that the benchmark decides."""
    given = split_arguments(words)
    for key, reason in DECIDED.items():
        if key in given:
            raise ValueError(f"{key} (command line): the benchmark sets it itself ({reason}); leave it out")
    return given


def hyper_parameters(dataset: str) -> dict[str, dict[str, Any]]:
    """Hyper-parameters by retriever from properties/benchmark/<dataset>.yaml; empty without such a file."""
    path = properties_dir() / "benchmark" / f"{dataset}.yaml"
    return read_yaml(path) if path.is_file() else {}


def measure_retriever(measurement: Measurement, retriever: str) -> dict[str, Any]:
    """RecBole's metrics, hit share and floor of one retriever on its test lists."""
    config = measurement.config(retriever, n_candidates=max(WIDTHS))
    with (
        Run(views.run_options(config).run_dir, config["seed"], config_threads(config)) as run,
        run.phase("retriever"),
    ):
        options = views.candidate_options(config)
        data = _data(config)
        cache = Cache(options.cache)
        source, host = list_source(config, options, data, cache, _fingerprint(config))
        store = _store(host)
        final = store.final()
        test = make_lists(data, source, "test", options.n)
        run.keep()
    targets = torch.from_numpy(test.targets)
    return {
        "options": hyper_parameters(measurement.dataset).get(retriever, {}),
        "seed": retriever_seed(config),
        "best_epoch": final.best_epoch,
        "train_seconds": store.training_seconds(),
        "metrics": recbole_metrics(host.config, host.dataset, torch.from_numpy(test.lists), targets),
        "unmasked": _unmasked(measurement, retriever, data) if final.kind == "sequential" else None,
        "widths": {str(n): _floor(test, n, config["seed"]) for n in WIDTHS},
    }


def _unmasked(measurement: Measurement, retriever: str, data: Data) -> dict[str, float]:
    """RecBole's metrics where items of the history stay in the lists, its own habit for sequential models."""
    config = measurement.config(retriever, mask_history=False)
    options = views.candidate_options(config)
    source, host = list_source(config, options, data, Cache(options.cache), _fingerprint(config))
    test = make_lists(data, source, "test", options.n)
    targets = torch.from_numpy(test.targets)
    return recbole_metrics(host.config, host.dataset, torch.from_numpy(test.lists), targets)


def _floor(lists: Lists, n: int, seed: int) -> dict[str, Any]:
    slots = np.minimum(lists.slots, n)
    return floor_of(("", "test"), slots, n, BOOTSTRAP, seed).to_dict()


def chosen_splits(text: str) -> tuple[str, tuple[str, ...]]:
    """`ItemKNN` is a retriever and all splits, `SASRec:last_m+leaky` one and some of them; ValueError otherwise."""
    retriever, _, listed = text.partition(":")
    splits = tuple(listed.split("+")) if listed else SPLITS
    for split in splits:
        if split not in SPLITS:
            raise ValueError(f"--splits {text!r}: {split!r} is none of {', '.join(SPLITS)}")
    return retriever, splits


def measure_splits(measurement: Measurement, retriever: str, splits: Sequence[str]) -> dict[str, Any]:
    """Reports of a run of one retriever under candidate splits that it allows: floors and second-stage baselines.

    Raises:
        ValueError: no split allows the retriever (`UserBoundError`), or a run is wrong in any other way.
    """
    from recbole_dgr2.quick_start import run_recbole_dgr2

    found: dict[str, Any] = {}
    refusal: UserBoundError | None = None
    for split in splits:
        config = measurement.config(retriever, candidate_split=split, n_candidates=SPLIT_WIDTH)
        folder = views.run_options(config).run_dir
        words = [f"--{key}={value}" for key, value in measurement.given.items()]
        own = hyper_parameters(measurement.dataset).get(retriever, {})
        keys = {"retriever": retriever, "stages": [], **own, "candidate_split": split}
        keys |= {"n_candidates": SPLIT_WIDTH, "run_dir": str(folder.with_name(f"{folder.name}-{split}"))}
        try:
            report = run_recbole_dgr2("DGR2", measurement.dataset, None, keys, words)
        except UserBoundError as error:
            logger.warning("%s under %s: %s", retriever, split, error)
            refusal = error
            continue
        kept = ("floors", "comparisons", "n_users", "n_hits", "phases")
        rows = [{key: row[key] for key in ("name", "all", "hits", "ci95")} for row in report["rows"]]
        found[split] = {**{key: report[key] for key in kept}, "rows": rows}
    if refusal and not found:
        raise refusal
    return found


def _store(host: Host) -> RetrieverStore:
    if host.store is None:
        raise ValueError("candidate_file: a benchmark measures retrievers, leave it out")
    return host.store


def config_threads(config: Config) -> int | None:
    """Threads of a run; None: measure."""
    return views.run_options(config).threads


def _data(config: Config) -> Data:
    data = load_data(config, views.run_options(config).data_folder, views.prompt_options(config))
    report_counts(data, config["expected_counts"])
    return data


def _fingerprint(config: Config) -> dict[str, str]:
    return data_fingerprint(Path(config["data_path"]), config["dataset"])


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    parser = command_parser("benchmark", __doc__)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--retrievers", default="", help="names, separated by commas")
    parser.add_argument(
        "--splits",
        default="",
        help="retrievers measured under each candidate split, or under some: SASRec:last_m+leaky",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="the JSON file; the page lies beside it as .md"
    )
    known, rest = parser.parse_known_args(arguments)
    measurement = Measurement(known.dataset, given_options(rest), known.output)
    asked = [chosen_splits(text) for text in known.splits.split(",") if text]
    for name in filter(None, known.retrievers.split(",")):
        measurement.add("retrievers", name, measure_retriever(measurement, name))
    for name, splits in asked:
        measurement.add_splits(name, measure_splits(measurement, name, splits))
    measurement.write_page(measurement.read())


if __name__ == "__main__":
    sys.exit(main())
