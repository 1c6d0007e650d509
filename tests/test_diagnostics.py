"""Diagnostics: bins, calibration and column sums by hand; what is examined of a tiny student; the command."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recbole_dgr2 import diagnose
from recbole_dgr2.decode.types import DecodeOptions, Request
from recbole_dgr2.model.replay import Trajectory
from recbole_dgr2.report.diagnostics import (
    Commits,
    MaskedSlots,
    calibration,
    diagnosis,
    diagnostics_page,
    label_sums,
)
from recbole_dgr2.report.plots import plot_calibration, plot_divergence
from recbole_dgr2.trainer import convert
from recbole_dgr2.trainer.diagnosis import examine, json_start, label_probabilities
from recbole_dgr2.trainer.rollouts import Roller
from recbole_dgr2.trainer.teacher import frozen_teacher
from tests.tiny import LABELS, random_tokens, tiny_backbone
from tests.toy_run import Finished

SLOTS = MaskedSlots(
    kl=np.array([0.1, 0.3, 1.0, 2.0]),
    masked_share=np.array([0.05, 0.1, 0.55, 1.0]),
    answer=np.array([False, True, True, False]),
)
COMMITS = Commits(np.array([1.0, 0.97, 0.96, 0.55]), np.array([True, True, False, True]))
MATRICES = [np.array([[0.6, 0.4], [0.6, 0.4]]), np.array([[0.9, 0.1], [0.1, 0.9]])]


def test_divergence_by_part_and_by_masked_share() -> None:
    found = diagnosis(SLOTS, COMMITS, MATRICES)
    assert found["kl"]["all"] == {"slots": 4, "kl": pytest.approx(0.85)}
    assert found["kl"]["reasoning"] == {"slots": 2, "kl": pytest.approx(1.05)}
    assert found["kl"]["answer"] == {"slots": 2, "kl": pytest.approx(0.65)}
    bins = found["kl_by_masked_share"]
    assert [entry["slots"] for entry in bins] == [2, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert bins[0] == {"low": 0.0, "high": 0.1, "slots": 2, "kl": pytest.approx(0.2)}
    assert bins[1]["kl"] is None and bins[9]["kl"] == 2.0


def test_calibration_by_hand() -> None:
    found = calibration(COMMITS)
    filled = {(entry["low"], entry["high"]): entry for entry in found["bins"] if entry["slots"]}
    assert list(filled) == [(0.5, 0.6), (0.95, 0.99), (0.99, 1.0)]
    assert filled[0.95, 0.99]["confidence"] == pytest.approx(0.965)
    assert filled[0.95, 0.99]["agreement"] == 0.5
    wanted = (2 * 0.465 + 1 * 0.0 + 1 * 0.45) / 4
    assert found["expected_calibration_error"] == pytest.approx(wanted)
    none = calibration(Commits(np.array([]), np.array([], dtype=bool)))
    assert (none["slots"], none["expected_calibration_error"]) == (0, None)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_every_commit_is_in_one_bin_and_the_error_is_a_share(pairs: list[tuple[float, bool]]) -> None:
    confidence, agrees = (np.array(values) for values in zip(*pairs, strict=True))
    found = calibration(Commits(confidence, agrees))
    assert sum(entry["slots"] for entry in found["bins"]) == len(pairs)
    for entry in found["bins"]:
        if entry["slots"]:
            assert entry["low"] - 1e-9 <= entry["confidence"] <= entry["high"] + 1e-9
    assert 0 <= found["expected_calibration_error"] <= 1


def test_column_sums_by_hand() -> None:
    found = label_sums(MATRICES)
    assert found["column_sums"] == pytest.approx([1.1, 0.9])
    assert found["column_deviation"] == pytest.approx((0.2 + 0.2 + 0 + 0) / 4)
    assert (found["lists"], found["row_sum"]) == (2, pytest.approx(1.0))
    assert found["doubly_taken"] == pytest.approx(1 / 4)
    mixed = label_sums([*MATRICES, np.full((3, 3), 1 / 3)])
    assert mixed["column_sums"] == pytest.approx([1.0, 1.0, 1.0])  # of the widest lists
    assert label_sums([])["column_deviation"] is None


def test_page_and_plots_of_what_may_be_empty(tmp_path: Path) -> None:
    empty = diagnosis(
        MaskedSlots(np.array([]), np.array([]), np.array([], dtype=bool)),
        Commits(np.array([]), np.array([], dtype=bool)),
        [],
    )
    found = {"conversion": diagnosis(SLOTS, COMMITS, MATRICES), "distillation": empty}
    page = diagnostics_page(json.loads(json.dumps(found, allow_nan=False)))
    for text in ("| conversion | 4 | 0.8500 | 1.0500 | 0.6500 |", "| 0.95-0.99 | 2 |", "1.10 0.90", "| - |"):
        assert text in page
    for plot in (plot_calibration, plot_divergence):
        plot(found, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000


def student(tau: float = 0.01) -> Roller:
    backbone, spec = convert(tiny_backbone(), 4)
    return Roller(backbone, spec, DecodeOptions("block", 10, 8, tau=tau, temperature=1.0))


def questions(n: int) -> list[tuple[Request, int]]:
    return [
        (Request(i, tuple(row)), 10) for i, row in enumerate(random_tokens([3 + i % 3 for i in range(n)]))
    ]


def labels(roller: Roller) -> list[int]:
    return list(roller.backbone.tokenizer.convert_tokens_to_ids(list(LABELS)))


def test_answers_without_masked_slots_are_refused() -> None:
    roller = student()
    assert roller.spec is not None
    teacher = frozen_teacher(tiny_backbone(), roller.backbone, roller.spec)
    plain = replace(roller, options=replace(roller.options, mode="autoregressive", block_size=None))
    with pytest.raises(ValueError, match="mode 'autoregressive' has no masked slots"):
        examine(plain, teacher, questions(2), labels(roller), seed=3)


def test_a_student_that_is_its_teacher_agrees_where_nothing_is_masked() -> None:
    roller = student(tau=1.0)
    assert roller.spec is not None
    teacher = frozen_teacher(tiny_backbone(), roller.backbone, roller.spec)
    found = examine(roller, teacher, questions(11), labels(roller), seed=3)
    completions = roller.greedy([request for request, _ in questions(11)])
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert len(found.confidence) == len(found.agrees) == tokens
    seeds = np.concatenate([[step == 0 for step in c.trace.steps[: len(c.token_ids)]] for c in completions])
    assert found.agrees[seeds].all()  # seeds are the clean stream's, and that is the teacher
    assert found.kl.min() > -1e-6 and len(found.kl) == len(found.share) == len(found.answer)
    thirds = {
        round(3 * share, 4) for share in found.share.tolist()
    }  # a block has three slots beside its seed
    assert thirds <= {1.0, 2.0, 3.0}
    again = examine(roller, teacher, questions(11), labels(roller), seed=3)
    np.testing.assert_array_equal(again.kl, found.kl)


@torch.no_grad()
def test_label_probabilities_are_those_of_the_canvas() -> None:
    roller = student()
    own, spec = labels(roller), roller.spec
    assert spec is not None
    tokens = (5, 6, own[1], 7, own[0], 8, own[2], 9)  # the second label begins a block
    trajectory = Trajectory(0, (3, 4, 2), tokens, (0, 1, 1, 1) * 2, (0.0,) * 8, 4, 0.9, 1.0, 8)
    found = label_probabilities(roller, trajectory, [2, 4, 6], own[:3])
    model = roller.backbone.model
    for row, slot in enumerate((2, 4, 6)):
        begin = slot // 4 * 4
        block = [spec.mask_id if k in (2, 6) else tokens[k] for k in range(begin, begin + 4)]
        if slot == 4:
            logits = model(torch.tensor([[3, 4, 2, *tokens[:4]]])).logits[0, -1]
        else:
            canvas = torch.tensor([[3, 4, 2, *tokens[:begin], *block]])
            allowed = torch.ones(canvas.shape[1], canvas.shape[1], dtype=torch.bool).tril()
            allowed[3 + begin :, 3 + begin :] = True
            logits = model(canvas, attention_mask=allowed[None, None]).logits[0, 3 + slot - 1]
        logits[spec.mask_id] = -torch.inf
        np.testing.assert_allclose(found[row], logits.softmax(0)[own[:3]].numpy(), atol=1e-5)


def test_the_answer_begins_at_its_last_object() -> None:
    backbone = tiny_backbone()
    ids = [backbone.tokenizer.encode(text, add_special_tokens=False) for text in ("a {b} c", '{"x', '":1}')]
    tokens = [token for part in ids for token in part]
    assert json_start(backbone, tokens) == len(ids[0])
    assert json_start(backbone, ids[2][:1]) == 1


@pytest.fixture(scope="module")
def folder(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = tmp_path_factory.mktemp("diagnosed") / "run"
    shutil.copytree(finished.folder, copied)
    return copied


def test_command_writes_figures_tables_and_plots(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in folder.iterdir()}
    assert diagnose.main([f"--run_dir={folder}", "--users=5"]) == 0
    printed = capsys.readouterr().out
    assert (folder / "diagnostics.md").read_text() == printed and "| conversion |" in printed
    content: dict[str, Any] = json.loads((folder / "diagnostics.json").read_text())
    figures = content["conversion"]
    assert figures["kl"]["all"]["slots"] > 0 and math.isfinite(figures["kl"]["all"]["kl"])
    written = {path.name for path in folder.iterdir()} - before
    plots = {"diagnostics_calibration.png", "diagnostics_divergence.png"}
    assert written == {"diagnostics.json", "diagnostics.md", *plots}


@pytest.mark.parametrize(
    ("change", "users", "message"),
    [
        ("none", "0", "users=0: expected an integer >= 1"),
        ("no student", "5", "none of the stages conversion, distillation, reinforcement is finished"),
        ("no teacher", "5", "ar_teacher"),
        ("no run", "5", "no run.json"),
    ],
)
def test_bad_input_is_one_line(
    change: str, users: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    victims = {"no student": ["conversion", "distillation", "reinforcement"], "no teacher": ["ar_teacher"]}
    for name in victims.get(change, []):
        shutil.rmtree(copied / name, ignore_errors=True)
    if change == "no run":
        (copied / "run.json").unlink()
    assert diagnose.main([f"--run_dir={copied}", f"--users={users}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
