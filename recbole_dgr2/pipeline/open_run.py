"""A finished run opened again: its data, its candidates, and every system that ranks them; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recbole_dgr2.config import Config
from recbole_dgr2.data.candidates import Candidates
from recbole_dgr2.data.evidence import fit_evidence
from recbole_dgr2.data.parts import final_part
from recbole_dgr2.data.ranking import Ranking, identity_ranking
from recbole_dgr2.data.reasoner import Reasoner
from recbole_dgr2.data.sequences import Rows
from recbole_dgr2.data.tasks import TaskBuilder
from recbole_dgr2.data.template import load_template
from recbole_dgr2.model.backbone import hide_progress_bars
from recbole_dgr2.model.checkpoint import INFO_FILE, load_stage, require_same_data
from recbole_dgr2.model.retriever import CHECKPOINT_NAME
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import Data, list_source, load_data
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.run_files import (
    GROUNDING_FILE,
    LOGIT_FILE,
    PROMPT_FILE,
    RETRIEVER_FOLDER,
    read_grounding,
    read_run_file,
)
from recbole_dgr2.pipeline.semantic_ids import read_semantic_ids
from recbole_dgr2.pipeline.sources import ListSource
from recbole_dgr2.pipeline.stage_order import broken_lineage, option_prefixes_without, require_lineage
from recbole_dgr2.pipeline.training import data_info, prompt_builder
from recbole_dgr2.report.export import RankedList, Status, falling_scores
from recbole_dgr2.system.cache import Cache, data_fingerprint
from recbole_dgr2.system.paths import prompt_file

STAGES = ("ar_teacher", "ar_teacher_rl", "conversion", "distillation", "reinforcement")
SAVED_SYSTEMS = ("retriever", "conditional_logit")
"""Systems without a language model that a run's folder is enough for."""
History = Literal["test", "all"]


@dataclass(frozen=True)
class OpenRun:
    """A finished run whose lists can be asked for; make one with `open_run`."""

    folder: Path
    config: Config
    data: Data
    source: ListSource

    @property
    def systems(self) -> tuple[str, ...]:
        """What can rank: the retriever, the conditional logit, and the stages that the run finished, without those
        that were made from other weights than their parent has now."""
        stages = [
            stage for stage in STAGES if self.finished(stage) and not broken_lineage(self.folder / stage)
        ]
        grounded = (self.folder / LOGIT_FILE).is_file()
        return (*(SAVED_SYSTEMS if grounded else SAVED_SYSTEMS[:1]), *stages)

    def finished(self, stage: str) -> bool:
        """Whether the folder holds that stage."""
        return (self.folder / stage / INFO_FILE).is_file()

    def recommend(
        self, user_ids: Sequence[Any], system: str | None = None, history: History = "test"
    ) -> list[RankedList]:
        """One list for every user asked, in the order asked; a user without one is "missing", with the reason.

        Args:
            user_ids: external ids; a user may be asked for twice.
            system: one of `systems`; None takes the last.
            history: "test" leaves out the last interaction of users who have a test row, as the report does, and takes
                all interactions of the others; "all" takes all of everyone.

        Raises:
            ValueError: no such system.
        """
        systems = self.systems
        name = system or systems[-1]
        if name in STAGES and self.finished(name):
            require_lineage(self.folder / name)
        elif name not in systems:
            raise ValueError(f"system {name!r}: this run has {', '.join(systems)}")
        names = [str(user) for user in user_ids]
        numbers = self._numbers()
        lengths = self.data.sequences.lengths
        known = sorted({numbers[user] for user in names if user in numbers and lengths[numbers[user]]})
        lists = self._ranked(np.array(known, dtype=np.int64), name, history)
        return [lists.get(numbers.get(user, 0)) or self._missing(user, numbers) for user in names]

    def users(self) -> list[str]:
        """External ids of all users."""
        return list(self._numbers())

    def _numbers(self) -> dict[str, int]:
        dataset = self.data.dataset
        tokens = dataset.field2id_token[dataset.uid_field]
        return {str(token): number for number, token in enumerate(tokens) if number}

    def _missing(self, user: str, numbers: dict[str, int]) -> RankedList:
        dataset = self.config["dataset"]
        if user not in numbers:
            reason = f"unknown user: not in {dataset}, or dropped by its filters"
        elif not self.data.sequences.lengths[numbers[user]]:
            reason = "no interactions"
        else:
            reason = f"no candidates: {self.source.name} proposes no item that is not in the user's history"
        return RankedList(user, (), (), "missing", reason)

    def _ranked(self, users: np.ndarray, system: str, history: History) -> dict[int, RankedList]:
        lengths = self.data.sequences.lengths[users]
        ends = np.where((lengths >= 3) & (history == "test"), lengths - 1, lengths)
        wide, n = self.source.propose(Rows(users, ends)), self.config["n_candidates"]
        candidates = Candidates(wide.rows, wide.ids[:, :n], wide.scores[:, :n])
        rankings = self._rankings(candidates, system)
        dataset = self.data.dataset
        user_tokens, item_tokens = (
            dataset.field2id_token[field] for field in (dataset.uid_field, dataset.iid_field)
        )
        lists = {}
        for row, ranking in enumerate(rankings):
            order = [slot for slot in ranking.order if candidates.ids[row, slot]]
            if order:
                items = tuple(str(item_tokens[item]) for item in candidates.ids[row, order])
                scores = falling_scores(candidates.scores[row, order])
                user = int(users[row])
                lists[user] = RankedList(str(user_tokens[user]), items, scores, *status_of(ranking))
        return lists

    def _rankings(self, candidates: Candidates, system: str) -> Sequence[Ranking]:
        if system == "retriever" or not len(candidates):
            return [identity_ranking(candidates.n)] * len(candidates)
        histories = candidates.rows.histories(self.data.sequences)
        if system != "conditional_logit":
            return self.language_model(system).rerank(candidates, histories)
        tasks, reasoner = self._grounded(LOGIT_FILE)
        values = reasoner.utilities(tasks.levels(candidates, histories))
        orders = np.argsort(-np.where(candidates.ids == 0, -np.inf, values), axis=1, kind="stable")
        return [Ranking(tuple(order), True, ()) for order in orders.tolist()]

    def _grounded(self, file: str) -> tuple[TaskBuilder, Reasoner]:
        """What turns lists into tasks, grounded in the final statistics, and the reasoner kept in `file`."""
        scale, reasoner = read_grounding(self.folder / file)
        final = final_part(self.data.sequences).sequences(self.data.sequences)
        evidence = fit_evidence(final, self.data.item_text)
        return TaskBuilder(evidence, scale, self.config["history_length"]), reasoner

    def language_model(self, stage: str) -> LanguageModelReranker:
        """The model of a finished stage, ready to re-rank.

        Raises:
            FileNotFoundError, ValueError: no such stage in this run, or one of other data, or made from other weights
                than its parent has now.
        """
        config, folder = self.config, self.folder / stage
        require_lineage(folder)
        hide_progress_bars()
        tasks, _ = self._grounded(GROUNDING_FILE)
        backbone, info = load_stage(folder)
        require_same_data(info, folder, data_info(config, self.data, tasks))
        template = load_template(prompt_file(config["prompt"]))
        prompts = prompt_builder(config, self.data, template, backbone)
        spec = info.block_diffusion
        options = views.decode_options(config, views.answer_mode(config, spec is not None))
        return LanguageModelReranker(tasks, prompts, backbone, spec, options)


def status_of(ranking: Ranking) -> tuple[Status, str]:
    """Status and reason of a list: "fallback" where nothing could be read and the order is the retriever's own."""
    if ranking.valid:
        return "ok", ""
    reason = ", ".join(ranking.failures)
    copied = tuple(ranking.order) == tuple(range(len(ranking.order)))
    return ("fallback" if "unparsed" in ranking.failures and copied else "repaired"), reason


def open_run(folder: Path | str, **changes: Any) -> OpenRun:
    """Open the folder of a finished run.

    Args:
        folder: as in run_dir.
        changes: options to change, such as data_path, decode_mode, tau or decode_batch_size.

    Raises:
        FileNotFoundError, ValueError: no run, or the data set has changed since.
    """
    folder = Path(folder)
    saved = read_run_file(folder)
    kept = {"prompt": str(folder / PROMPT_FILE)} if (folder / PROMPT_FILE).is_file() else {}
    options = {**saved.options, **kept, **changes, "cache_dir": None}
    checkpoint = folder / RETRIEVER_FOLDER / CHECKPOINT_NAME
    if options.get("candidate_file"):
        options["candidate_file"] = str(folder / RETRIEVER_FOLDER / Path(options["candidate_file"]).name)
    elif not checkpoint.is_file():
        raise FileNotFoundError(f"{checkpoint}: no such file, so the run cannot be opened; run it again")
    else:
        options["retriever_checkpoint"] = str(checkpoint)
    config = Config("DGR2", saved.dataset, None, options)
    fingerprint = data_fingerprint(Path(config["data_path"]), saved.dataset)
    changed = sorted(name for name, digest in saved.data.items() if fingerprint.get(name) != digest)
    if changed:
        raise ValueError(
            f"{Path(config['data_path']) / changed[0]}: not the file the run was made with; run it again"
        )
    data = load_data(config, Path(config["data_path"]), views.prompt_options(config))
    data = read_semantic_ids(config, data, folder)
    source, _ = list_source(config, views.candidate_options(config), data, Cache(None), fingerprint)
    return OpenRun(folder, config, data, source)


def changed_options(opened: OpenRun) -> dict[str, Any]:
    """Options of the run, and of the stages it trained, that are not the defaults of its data set; no folders, and not
    the mode in which the run itself answers, which no measurement that asks for this follows."""
    saved = read_run_file(opened.folder)
    folder = str(Path(opened.config["data_path"]).parent)
    defaults = Config("DGR2", saved.dataset, None, {"data_path": folder})
    places = ("data_path", "run_dir", "checkpoint_dir", "cache_dir", "retriever_checkpoint")
    skipped = (*places, "show_progress", "decode_mode")
    later = option_prefixes_without(saved.options["stages"])
    return {
        key: Path(value).stem if key == "prompt" else value
        for key, value in sorted(saved.options.items())
        if key not in skipped
        and not key.startswith(later)
        and (key not in defaults or defaults[key] != value)
    }
