"""The lessons of a run: which source writes their reasoning traces, and where written ones are kept."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recbole_dgr2.config import Config
from recbole_dgr2.data.lessons import Lesson, write_lessons
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.data.rejection import (
    EvidenceSource,
    Problem,
    SamplingOptions,
    TraceSource,
    collect_lessons,
    settings_of,
)
from recbole_dgr2.data.tasks import TaskBuilder
from recbole_dgr2.data.template import PromptTemplate
from recbole_dgr2.data.trace_store import TraceStore
from recbole_dgr2.pipeline.preparation import Data, Lists, draw_lists, tasks_of
from recbole_dgr2.pipeline.run import Run
from recbole_dgr2.pipeline.views import TraceOptions, candidate_options, trace_options
from recbole_dgr2.report.acceptance import trace_entry
from recbole_dgr2.system.cache import digest_of
from recbole_dgr2.utils import item_tokens, user_tokens

logger = logging.getLogger(__name__)


class Scribe:
    """Writes the lessons of a run with the source that its config names.

    The reasoner's traces of every list are a function of the lists and quick to write, so they are not kept; all others
    go into a file beside the cache's other entries, or into the run's folder where nothing is cached.

    Args:
        config: the run's.
        texts: data set and prompt.
        reasoner: fitted on the training lists.
        run: the run.
    """

    def __init__(
        self, config: Config, texts: tuple[Data, PromptTemplate], reasoner: Reasoner, run: Run
    ) -> None:
        self._data, self._template = texts
        self._reasoner = reasoner
        self._options = trace_options(config)
        self._seed = config["seed"]
        self.entries: list[dict[str, Any]] = []
        self._source: TraceSource | None = None
        self._store: TraceStore | None = None
        if not self._options.plain:
            options = self._options
            sampling = SamplingOptions(
                options.mode,
                options.attempts,
                options.temperature,
                self._seed,
                0 if options.source == "evidence" else options.max_tokens,
                self._template.trace_form,
            )
            self._sampling = sampling
            self._source = self._make_source(sampling, config["decode_batch_size"])
            self._store = TraceStore(self._path(config, run))

    def write(self, phase: str, builder: TaskBuilder, lists: Lists, most: int) -> list[Lesson]:
        """Lessons of at most `most` lists of a phase, drawn by seed; of lists with a hit unless traces need no target.

        What they cost is added to `entries` under the phase's name.

        Raises:
            ValueError: no list has a hit, or none got a trace.
        """
        if self._source is None or self._store is None:
            tasks = tasks_of(builder, lists, draw_lists(lists, most, self._seed))
            return write_lessons(tasks, self._reasoner, self._template, self._data.item_text)
        rows = draw_lists(lists, most, self._seed, hits_only=self._options.mode != "all")
        users, items = user_tokens(self._data.dataset), item_tokens(self._data.dataset)
        slots = lists.slots.tolist()
        problems = [
            Problem(
                task=task,
                slot=slots[row] if slots[row] < len(task.candidates) else None,
                user=users[int(lists.candidates.rows.users[row])],
                items=tuple(items[item] for item in task.candidates),
            )
            for row, task in zip(rows.tolist(), tasks_of(builder, lists, rows), strict=True)
        ]
        lessons, counts = collect_lessons(problems, self._source, self._store, self._sampling)
        logger.info("traces of %s lists in %s: %s", phase, self._store.path, counts)
        self.entries.append(trace_entry(phase, settings_of(self._source, self._sampling), counts))
        return lessons

    def _make_source(self, sampling: SamplingOptions, together: int) -> TraceSource:
        options, item_text = self._options, self._data.item_text
        if options.source == "evidence":
            return EvidenceSource(self._reasoner, self._template, item_text, sampling)
        from recbole_dgr2.model.backbone import load_backbone
        from recbole_dgr2.pipeline.trace_sources import LocalSource, Server, ServerSource, Showing, model_name

        showing, model = Showing(self._template, item_text), str(options.model)
        if options.source == "hf":
            backbone = load_backbone(model, ())
            sizes = (options.max_tokens, together)
            return LocalSource(backbone, model_name(model), showing, sampling, sizes)
        key = None if options.api_key_env is None else os.environ[options.api_key_env]
        server = Server(str(options.base_url), key, options.timeout, options.concurrency, options.max_tokens)
        return ServerSource(server, model, showing, sampling)

    def _path(self, config: Config, run: Run) -> Path:
        assert self._source is not None
        kept = candidate_options(config).cache
        if kept is None:
            run.keep()  # written traces outlast a run that fails
            return run.folder / "traces.jsonl"
        decides = asdict(settings_of(self._source, self._sampling))
        return kept / f"traces-{config['dataset']}-{digest_of(decides)}.jsonl"


def require_writer(config: Config) -> None:
    """Raise ValueError where the options of the traces do not fit together, before anything is trained."""
    options: TraceOptions = trace_options(config)
    name = options.api_key_env
    if options.source == "openai" and name is not None and not os.environ.get(name):
        raise ValueError(
            f"trace_api_key_env: the environment has no {name}; set it to the server's key, or set trace_api_key_env "
            "to null for a server without keys"
        )
