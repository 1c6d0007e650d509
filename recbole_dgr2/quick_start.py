"""The whole pipeline, read from top to bottom: retriever, candidates, traces, stages, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recbole_dgr2.config import Config
from recbole_dgr2.data.candidates import HeadOptions
from recbole_dgr2.data.prompt import require_sids
from recbole_dgr2.data.sequences import Phase
from recbole_dgr2.data.template import PromptTemplate, load_template
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.baselines import assess_baselines
from recbole_dgr2.pipeline.preparation import (
    CachedFacts,
    Data,
    Grounding,
    Host,
    Lists,
    ground,
    list_source,
    load_data,
    make_lists,
    ranking_data,
    report_counts,
)
from recbole_dgr2.pipeline.rank_files import compare_rows
from recbole_dgr2.pipeline.run import Run, library_versions
from recbole_dgr2.pipeline.run_files import (
    GROUNDING_FILE,
    LOGIT_FILE,
    REPORT_FILE,
    RETRIEVER_FOLDER,
    require_same_points,
    write_grounding,
    write_run_file,
)
from recbole_dgr2.pipeline.semantic_ids import add_semantic_ids, check_semantic_ids
from recbole_dgr2.pipeline.stage_order import (
    PARENTS,
    TEACHER,
    require_shardable,
    start_folder,
    unchanged_stages,
)
from recbole_dgr2.report.assessment import Panel, assess_retriever, draw_sample
from recbole_dgr2.report.floors import Floor, agree, floor_of
from recbole_dgr2.report.tables import Row, RunInfo, build_report, print_report, write_report
from recbole_dgr2.system import processes
from recbole_dgr2.system.cache import Cache, data_fingerprint
from recbole_dgr2.system.paths import prompt_file
from recbole_dgr2.utils import recbole_metrics

PHASES: tuple[Phase, ...] = ("train", "valid", "test")
PHASE_NAMES: dict[Phase, str] = {"train": "training", "valid": "validation", "test": "test"}

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
    processes.start()
    with processes.main_first():
        config = Config(model, dataset, config_file_list, config_dict, arguments)
        data, template = _read(config)
    options = views.run_options(config)
    with Run(options.run_dir, options.seed, options.threads) as run:
        return _pipeline(config, data, template, run)


def _read(config: Config) -> tuple[Data, PromptTemplate]:
    """Data set and prompt of a run; whatever can be seen to be wrong with its options is an error here."""
    options = views.run_options(config)
    if processes.world() > 1 and views.candidate_options(config).cache is None:
        raise ValueError(
            f"cache_dir: null with {processes.world()} processes, which share what is prepared through the cache; "
            "expected auto or a folder"
        )
    data = load_data(config, options.data_folder, views.prompt_options(config))
    HeadOptions(config["n_candidates"], max(config["topk"]), config["mask_history"]).check(
        data.sequences.n_items
    )
    if not (data.sequences.lengths >= 3).any():
        raise ValueError(
            f"data set {config['dataset']}: no user has three interactions, so there is no list to test on"
        )
    check_semantic_ids(config, data)
    template = load_template(prompt_file(config["prompt"]))
    require_sids(template, config["semantic_ids"] is not None)
    if options.stages:
        from recbole_dgr2.pipeline.tracing import require_writer

        start_folder(config)
        require_shardable(config)
        require_writer(config)
    if TEACHER not in options.stages and any((options.run_dir / stage).is_dir() for stage in PARENTS):
        require_same_points(options.run_dir / GROUNDING_FILE, config["points_per_unit"])
    return data, template


def _pipeline(config: Config, data: Data, template: PromptTemplate, run: Run) -> dict[str, Any]:
    stages, options = views.run_options(config).stages, views.candidate_options(config)
    with run.phase("retriever"):
        fingerprint = data_fingerprint(Path(config["data_path"]), config["dataset"])
        report_counts(data, config["expected_counts"])
        cache = Cache(options.cache)
        source, host = list_source(config, options, data, cache, fingerprint)
        with processes.main_first():
            source.prepare()
            data = add_semantic_ids(config, data, (host, cache), run.folder)
    with run.phase("candidates"), processes.main_first():
        phases: dict[Phase, Lists] = {phase: make_lists(data, source, phase, options.n) for phase in PHASES}
        panel = _panel(config, host, phases["test"])
        floors = _floors(config, phases, panel)
        if processes.is_main():
            write_run_file(run.folder, config, fingerprint)
            source.keep(run.folder / RETRIEVER_FOLDER)
    rows, extras = [assess_retriever(panel)], {"floors": list(map(Floor.to_dict, floors))}
    cached = CachedFacts(cache, fingerprint, options.history_length)
    if stages or phases["train"].has_hits:
        with run.phase("facts"), processes.main_first():
            grounding = ground(data, source, phases, views.prompt_options(config), cached)
            if processes.is_main():
                write_grounding(run.folder / GROUNDING_FILE, (grounding.final.scale, grounding.reasoner))
        with run.phase("baselines"):
            rows += processes.from_main(lambda: _baselines(config, grounding, phases, panel, run.folder))
    if stages:
        lists = (phases["train"], phases["valid"], phases["test"])
        found, more = _stages(config, (data, template), (grounding, lists, panel), run)
        rows += found
        extras.update(more)
    run.keep()
    extras["comparisons"] = processes.from_main(lambda: compare_rows(config, rows, panel, run.folder))
    info = RunInfo(
        dataset=config["dataset"],
        retriever=source.name,
        n_candidates=options.n,
        n_users=len(panel.targets),
        n_hits=len(panel.hits),
        seed=config["seed"],
        versions=library_versions(),
        phases=run.seconds,
    )
    report = build_report(info, rows, extras)
    if processes.is_main():
        write_report(report, run.folder / REPORT_FILE)
        print_report(report)
    return report


def _baselines(
    config: Config, grounding: Grounding, phases: Mapping[Phase, Lists], panel: Panel, folder: Path
) -> list[Row]:
    """Rows of the baselines; the conditional logit goes into the run's folder."""
    parts = {phase: ranking_data(grounding.facts[phase], lists) for phase, lists in phases.items()}
    rows, logit = assess_baselines(panel, parts, config["fact_levels"])
    if logit:
        write_grounding(folder / LOGIT_FILE, logit)
    return rows


def _stages(
    config: Config,
    texts: tuple[Data, PromptTemplate],
    material: tuple[Grounding, tuple[Lists, Lists, Lists], Panel],
    run: Run,
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of the language model's stages, each trained and assessed, and what the report says of its prompts.

    Only here is transformers needed.
    """
    from recbole_dgr2.pipeline.stages import run_stages
    from recbole_dgr2.pipeline.training import make_setting

    with run.phase("traces"):
        setting, backbone = make_setting(config, run, texts, *material)
    run.keep()
    rows = run_stages(setting, backbone)
    unchanged = unchanged_stages(run.folder, [row.name for row in rows])
    return rows, {
        "trimmed": setting.trimmed,
        "traces": setting.traces,
        **({"unchanged": unchanged} if unchanged else {}),
    }


def _panel(config: Config, host: Host, test: Lists) -> Panel:
    options = views.report_options(config)

    def metrics(lists: np.ndarray) -> dict[str, float]:
        targets = torch.from_numpy(test.targets)
        return recbole_metrics(host.config, host.dataset, torch.from_numpy(lists), targets)

    return Panel(
        candidates=test.candidates,
        targets=test.targets,
        lists=test.lists,
        sample=draw_sample(test.candidates, options.validity_sample, config["seed"]),
        metrics=metrics,
        bootstrap_samples=options.bootstrap_samples,
        seed=config["seed"],
    )


def _floors(config: Config, phases: Mapping[Phase, Lists], panel: Panel) -> list[Floor]:
    """The retriever's own order on hits, phase by phase: training and test should agree."""
    split, n = config["candidate_split"], panel.candidates.n
    floors = {
        phase: floor_of((split, name), phases[phase].slots, n, panel.bootstrap_samples, panel.seed)
        for phase, name in PHASE_NAMES.items()
    }
    for floor in floors.values():
        shown = ", ".join(f"{metric} {value:.4f}" for metric, value in floor.metrics.items())
        text = "%s lists: %d, hits: %d, floor on hits: %s"
        logger.info(text, floor.phase, floor.lists, floor.hits, shown or "none")
    if agree(floors["train"], floors["test"]) is False:
        logger.warning(
            "the floor on training lists is outside the 95 %% intervals of the floor on test lists "
            "(candidate_split %s)",
            split,
        )
    return list(floors.values())
