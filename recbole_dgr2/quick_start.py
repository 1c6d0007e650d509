"""The whole pipeline, read from top to bottom: retriever, candidates, traces, stages, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recbole_dgr2 import views
from recbole_dgr2.config import Config
from recbole_dgr2.data.prompt import PromptTemplate, load_template
from recbole_dgr2.paths import prompt_file
from recbole_dgr2.preparation import (
    Data,
    Lists,
    Retrievers,
    ground,
    load_data,
    make_lists,
    prepare_retrievers,
)
from recbole_dgr2.report.assessment import Panel, assess_retriever, draw_sample
from recbole_dgr2.report.evaluation import mean_metrics
from recbole_dgr2.report.tables import RunInfo, build_report, print_report, write_report
from recbole_dgr2.run import Run, library_versions
from recbole_dgr2.training import convert_and_assess, make_setting, require_teacher, teach_and_assess
from recbole_dgr2.utils import recbole_metrics

logger = logging.getLogger(__name__)


def run_recbole_dgr2(
    model: str = "DGR2",
    dataset: str | None = None,
    config_file_list: Sequence[str | Path] | None = None,
    config_dict: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run the pipeline that the config describes, and return its report (also written to `report.json`).

    Args:
        model: "DGR2".
        dataset: name of the data set.
        config_file_list: YAML files, later ones win.
        config_dict: keys and values.
        arguments: command line as a list of `--key=value`.

    Raises:
        ValueError, FileNotFoundError: a key, a file or the data set is not as expected; one line that says what to do.
    """
    config = Config(model, dataset, config_file_list, config_dict, arguments)
    options = views.run_options(config)
    data = load_data(config, options.data_folder, views.prompt_options(config))
    views.candidate_options(config).head(max(config["topk"])).check(data.sequences.n_items)
    template = load_template(prompt_file(config["prompt"]))
    require_teacher(options)
    with Run(options.run_dir, options.seed, options.threads) as run:
        return _pipeline(config, data, template, run)


def _pipeline(config: Config, data: Data, template: PromptTemplate, run: Run) -> dict[str, Any]:
    stages, options = views.run_options(config).stages, views.candidate_options(config)
    with run.phase("retriever"):
        retrievers = prepare_retrievers(config, options, run.folder)
    with run.phase("candidates"):
        train, valid, test = (
            make_lists(data, retrievers, phase, options, max(config["topk"]))
            for phase in ("train", "valid", "test")
        )
        panel = _panel(config, data, retrievers, test)
        _log_floors({"training": train, "validation": valid, "test": test})
    rows = [assess_retriever(panel)]
    if stages:
        with run.phase("traces"):
            grounding = ground(data, retrievers, train, views.prompt_options(config), options.history_length)
            lists = (train, valid, test)
            setting, backbone = make_setting(config, run, (data, template), grounding, lists, panel)
        run.keep()
        if "ar_teacher" in stages:
            rows += teach_and_assess(setting, backbone)
        if "conversion" in stages:
            rows += convert_and_assess(setting, backbone)
    run.keep()
    info = RunInfo(
        dataset=config["dataset"],
        retriever=retrievers.final.name,
        n_candidates=options.n,
        n_users=len(panel.targets),
        n_hits=len(panel.hits),
        seed=config["seed"],
        versions=library_versions(),
        phases=run.seconds,
    )
    report = build_report(info, rows)
    write_report(report, run.folder / "report.json")
    print_report(report)
    return report


def _panel(config: Config, data: Data, retrievers: Retrievers, test: Lists) -> Panel:
    options = views.report_options(config)

    def metrics(lists: np.ndarray) -> dict[str, float]:
        targets = torch.from_numpy(test.targets)
        return recbole_metrics(retrievers.config, retrievers.dataset, torch.from_numpy(lists), targets)

    return Panel(
        candidates=test.candidates,
        targets=test.targets,
        lists=test.lists,
        sample=draw_sample(test.candidates, options.validity_sample, config["seed"]),
        metrics=metrics,
        bootstrap_samples=options.bootstrap_samples,
        seed=config["seed"],
    )


def _log_floors(phases: Mapping[str, Lists]) -> None:
    """The retriever's own order on hits, phase by phase: training and test should agree."""
    for name, lists in phases.items():
        slots, n = lists.slots, lists.candidates.n
        hits = slots[slots < n]
        shown = ", ".join(f"{metric} {value:.4f}" for metric, value in mean_metrics(hits, n).items())
        logger.info("%s lists: %d, hits: %d, floor on hits: %s", name, len(slots), len(hits), shown or "none")
