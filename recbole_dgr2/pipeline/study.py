"""Finished runs that differ in seed, decoded again stage by stage; what was decoded before is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from recbole_dgr2.decode import DecodeOptions
from recbole_dgr2.model.adapters import merge, weights_digest
from recbole_dgr2.model.checkpoint import read_info
from recbole_dgr2.pipeline.open_run import OpenRun, changed_options
from recbole_dgr2.pipeline.rank_files import RANKS_FILE, read_ranks
from recbole_dgr2.pipeline.reranker import LanguageModelReranker
from recbole_dgr2.pipeline.run_files import read_run_file
from recbole_dgr2.pipeline.study_decoding import BATCH, Bank, equal_share, plain_entry
from recbole_dgr2.pipeline.study_file import SETTINGS, compact_json, read_study
from recbole_dgr2.pipeline.study_members import (
    Member,
    RunLists,
    Variant,
    describe,
    is_student,
    members_of,
    open_tested,
    require_same_lists,
    training_seconds,
    training_traces,
)
from recbole_dgr2.pipeline.study_options import common_options, differing_options
from recbole_dgr2.report.assessment import draw_sample
from recbole_dgr2.report.comparison import PLAIN_SYSTEMS
from recbole_dgr2.report.study_figures import AR, FLOOR, NAIVE, PLAIN, SPECULATIVE, TAU
from recbole_dgr2.system.cache import write_text
from recbole_dgr2.trainer import convert

KEY = ("name", "seed", "weights")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is decoded. users: random users whose answers are judged; timed: requests timed at batch 1, 0 for none."""

    runs: tuple[Path, ...]
    variants: tuple[Variant, ...]
    taus: tuple[float, ...]
    users: int
    timed: int
    data_path: str | None = None

    def decoders(self, member: Member) -> list[str]:
        """How a member is decoded; `naive` and variants at tau 0.9 alone, an autoregressive stage in one way."""
        if not is_student(member):
            return [AR]
        if member.name == NAIVE or member.varies is not None:
            return [TAU]
        blocks = [f"block {tau:g}" for tau in sorted({*self.taus, 0.9}, reverse=True)]
        spec = read_info(member.folder).block_diffusion
        assert spec is not None  # of a student
        return [AR, *blocks, *([SPECULATIVE] if spec.context == "causal" else [])]


class Study:
    """The content of a study's file, which is written after each entry.

    Raises:
        ValueError, FileNotFoundError: runs that cannot be compared, or a file of another study.
    """

    def __init__(self, plan: Plan, path: Path, about: Mapping[str, Any]) -> None:
        self._plan, self._path = plan, path
        self._members = members_of(plan.runs, plan.variants)
        self._opened: tuple[Path, OpenRun, RunLists] | None = None
        self._runs = list(dict.fromkeys([*plan.runs, *(member.run for member in self._members)]))
        self._weights = {member: _digest(member) for member in self._members}
        plain, options = self._checked()
        opened, tested = self._open(plan.runs[0])  # open still
        self._sample_seed = int(opened.config["seed"])
        self._sample = draw_sample(tested.lists.candidates, plan.users, self._sample_seed)
        if not len(self._sample):
            raise ValueError(f"{plan.runs[0]}: no user has a test list, so there is nothing to decode")
        self.content: dict[str, Any] = {
            **about,
            "dataset": opened.config["dataset"],
            "retriever": opened.source.name,
            "runs": list(map(str, plan.runs)),
            "seeds": list(dict.fromkeys(member.seed for member in self._members)),
            "n_candidates": tested.lists.candidates.n,
            "n_users": len(tested.lists.targets),
            "n_hits": len(tested.hits),
            "lists": tested.digest,
            "sample": len(self._sample),
            "sample_seed": self._sample_seed,
            "max_new_tokens": opened.config["max_new_tokens"],
            "batch": BATCH,
            "timed": plan.timed,
            "options": options,
            "variant_options": self._variant_options(),
            "entries": plain,
            "speeds": [],
        }
        self._take_over()

    def run(self) -> dict[str, Any]:
        """Decode and time whatever the file lacks; the content."""
        steps = [
            (member, decoder) for member in self._members for decoder in [*self._plan.decoders(member), None]
        ]
        bank: tuple[Member, Bank] | None = None
        for member, decoder in tqdm(steps, "study", unit="step", disable=None):
            if decoder is None and (not self._plan.timed or self._timed(member)):
                continue
            if decoder is not None and self._entry(member, decoder) is not None:
                continue
            if bank is None or bank[0] != member:
                bank = (member, self._bank(member))
            logger.info("%s: %s", describe(member), decoder or "speed")
            if decoder is None:
                self._time(member, bank[1])
            else:
                self._decode(member, decoder, bank[1])
            self.write()
        self.write()
        return self.content

    def write(self) -> None:
        """Write the file, whole or not at all; an entry is one line of it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, compact_json(self.content))

    def _checked(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Opens every run once and compares its test lists with the first run's.

        Returns:
            Entries of the plain systems, and the options that are not the defaults.
        """
        entries: list[dict[str, Any]] = []
        options: list[dict[str, Any]] = []
        first = self._open(self._plan.runs[0])
        for run in tqdm(self._runs, "runs", unit="run", leave=False, disable=None):
            opened, tested = self._open(run)
            require_same_lists((first[0].config, first[1]), (opened.config, tested), run)
            if run in self._plan.runs:
                entries += _plain_entries(opened, tested)
                options.append(changed_options(opened))
        self._opened = (self._plan.runs[0], *first)  # what is decoded first
        return entries, common_options(options)

    def _variant_options(self) -> dict[str, dict[str, Any]]:
        """Of each variant, the options in which its runs differ from those of the same seeds."""
        options = {run: read_run_file(run).options for run in self._runs}
        of_seed = {options[run]["seed"]: options[run] for run in self._plan.runs}
        return {
            one.name: differing_options(
                [(options[run], of_seed[options[run]["seed"]]) for run, _ in one.stages]
            )
            for one in self._plan.variants
        }

    def _open(self, run: Path) -> tuple[OpenRun, RunLists]:
        """The run, which stays open until another is asked for."""
        if self._opened is None or self._opened[0] != run:
            self._opened = None  # its memory first
            self._opened = (run, *open_tested(run, self._plan.data_path))
        return self._opened[1:]

    def _take_over(self) -> None:
        """Entries of an earlier call whose stages still have the same weights."""
        if not self._path.is_file():
            return
        old = read_study(self._path)
        for key in SETTINGS:
            if old[key] != self.content[key]:
                raise ValueError(
                    f"{self._path}: made with {key} {old[key]}, now {self.content[key]}; give another --output, "
                    "or delete the file"
                )
        wanted = {(member.name, member.seed, self._weights[member]) for member in self._members}
        named = {(member.name, member.seed) for member in self._members}
        lost = [one for one in old["entries"] if one["weights"] and (one["name"], one["seed"]) not in named]
        if lost:
            raise ValueError(
                f"{self._path}: holds {lost[0]['name']} of seed {lost[0]['seed']}, which this call leaves out; name "
                "its run or variant too, give another --output, or delete the file"
            )
        self.content["timed"] = self._plan.timed or old["timed"]
        for part in ("entries", "speeds"):
            self.content[part] += [one for one in old[part] if tuple(one.get(key) for key in KEY) in wanted]

    def _same(self, part: str, member: Member) -> list[dict[str, Any]]:
        wanted = (member.name, member.seed, self._weights[member])
        return [one for one in self.content[part] if tuple(one.get(key) for key in KEY) == wanted]

    def _entry(self, member: Member, decoder: str) -> dict[str, Any] | None:
        return next((one for one in self._same("entries", member) if one["decoder"] == decoder), None)

    def _timed(self, member: Member) -> bool:
        wanted = {AR, *self._plan.decoders(member)}
        found = [speed for speed in self._same("speeds", member) if speed["requests"] == self._plan.timed]
        return any(not speed["decoders"] or wanted <= set(speed["decoders"]) for speed in found)

    def _named(self, member: Member) -> dict[str, Any]:
        return {
            "name": member.name,
            "seed": member.seed,
            "weights": self._weights[member],
            "run": str(member.run),
        }

    def _decode(self, member: Member, decoder: str, bank: Bank) -> None:
        whole = decoder != SPECULATIVE and member.name != NAIVE
        entry = bank.entry(decoder, self._base(), whole)
        base = self._entry(member, AR)
        entry["equal_to_ar"] = equal_share(entry, base) if base else None
        if decoder == SPECULATIVE and entry["equal_to_ar"] != 1.0:
            logger.warning(
                "%s: %.4f of the speculative outputs equal the autoregressive ones, expected all",
                describe(member),
                entry["equal_to_ar"],
            )
        entry["seconds"] = None if member.name == NAIVE else training_seconds(member.run, member.stage)
        entry["traces"] = training_traces(member)
        entry |= {"stage": member.stage, "teacher": member.teacher, "varies": member.varies}
        self.content["entries"].append({**self._named(member), **entry})

    def _time(self, member: Member, bank: Bank) -> None:
        names = list(dict.fromkeys([AR, *self._plan.decoders(member)]))
        speeds = bank.speed(names, self._base(), self._plan.timed)
        kept = [one for one in self.content["speeds"] if one not in self._same("speeds", member)]
        own = {**self._named(member), "requests": self._plan.timed, "decoders": speeds}
        self.content["speeds"] = [*kept, own]

    def _base(self) -> DecodeOptions:
        return DecodeOptions(AR, self.content["max_new_tokens"], BATCH, seed=self._sample_seed)

    def _bank(self, member: Member) -> Bank:
        opened, tested = self._open(member.run)
        reranker = opened.language_model(member.stage)
        if member.name == NAIVE:
            reranker = _converted(opened, reranker)
        return Bank(reranker, tested, self._sample, self._sample_seed)


def _digest(member: Member) -> str:
    """What decides a member's outputs: its weights, and for `naive`, whose folder has none yet, its conversion."""
    weights = weights_digest(member.folder)
    if member.name != NAIVE:
        return weights
    options = read_run_file(member.run).options
    return f"{weights}, {options['block_size']} {options['context']}"


def _converted(opened: OpenRun, reranker: LanguageModelReranker) -> LanguageModelReranker:
    """The teacher's weights as a block-diffusion model, without training."""
    plain, spec = convert(merge(reranker.backbone), opened.config["block_size"], opened.config["context"])
    return replace(reranker, backbone=plain, spec=spec)


def _plain_entries(opened: OpenRun, tested: RunLists) -> list[dict[str, Any]]:
    """Entries of the retriever and of the baselines of one run, by the ranks that it kept."""
    saved, seed = read_ranks(opened.folder), int(opened.config["seed"])
    if saved.lists != tested.digest:
        raise ValueError(
            f"{opened.folder / RANKS_FILE}: of other test lists than the run has now; run {opened.folder} again"
        )
    ranks = {name: saved.ranks[name] for name in PLAIN_SYSTEMS[1:] if name in saved.ranks}
    ranks[FLOOR] = tuple(np.asarray(tested.lists.slots)[tested.hits].tolist())
    named = {"weights": None, "run": str(opened.folder), "decoder": PLAIN, "seconds": None}
    named |= {"stage": None, "teacher": None, "varies": None}
    return [
        {"name": name, "seed": seed, **named, **plain_entry(tested, ranks[name], seed)}
        for name in PLAIN_SYSTEMS
        if name in ranks
    ]
