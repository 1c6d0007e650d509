"""Lists from the folder of a finished run: one entry a user asked, with a status and a reason, and nothing trained."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.data.candidate_files import read_candidate_file
from recbole_dgr2.data.ranking import Ranking
from recbole_dgr2.model.checkpoint import INFO_FILE
from recbole_dgr2.pipeline import retrieval
from recbole_dgr2.pipeline.open_run import OpenRun, open_run, status_of
from recbole_dgr2.recommend import main, recommend
from recbole_dgr2.report.export import write_lists
from tests.atomic import run, walks, write
from tests.toy_run import Finished
from tests.toy_run import run as train_again


@pytest.fixture(scope="module")
def opened(finished: Finished) -> OpenRun:
    return open_run(finished.folder)


def test_systems_of_a_run(opened: OpenRun) -> None:
    assert opened.systems == (
        "retriever",
        "conditional_logit",
        "ar_teacher",
        "conversion",
        "distillation",
        "reinforcement",
    )
    with pytest.raises(ValueError, match="system 'lambdarank': this run has retriever, conditional_logit"):
        opened.recommend(["u1"], "lambdarank")


def test_nothing_is_trained(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: object) -> None:
        raise AssertionError("trained")

    for name in ("train_retriever", "train_part_retriever"):
        monkeypatch.setattr(retrieval, name, fail)
    assert recommend(finished.folder, ["u1"])[0].user_id == "u1"


def test_one_entry_for_every_user_asked(opened: OpenRun) -> None:
    """RecBole #1908, #690, #1693, #1564: repeated, unknown and odd users; none is dropped."""
    asked = ["u2", "nobody", "u1", "u2", "[PAD]", ""]
    lists = opened.recommend(asked, "retriever")
    assert [entry.user_id for entry in lists] == asked
    assert [entry.status for entry in lists] == ["ok", "missing", "ok", "ok", "missing", "missing"]
    assert lists[0] == lists[3]
    assert lists[1].reason == "unknown user: not in toy, or dropped by its filters"
    assert opened.recommend([], "retriever") == []


def test_test_lists_are_those_of_the_report(finished: Finished, opened: OpenRun) -> None:
    test, data = finished.setting.test, finished.setting.data
    users = [str(data.dataset.field2id_token["user_id"][user]) for user in test.candidates.rows.users]
    lists = opened.recommend(users, "retriever")
    tokens = data.dataset.field2id_token["item_id"]
    for entry, ids, scores in zip(lists, test.candidates.ids, test.candidates.scores, strict=True):
        assert entry.items == tuple(tokens[ids[ids > 0]])
        assert entry.scores == pytest.approx(scores[ids > 0].tolist())


def test_the_whole_history_is_another_question(opened: OpenRun) -> None:
    dataset, sequences = opened.data.dataset, opened.data.sequences
    last = dataset.field2id_token["item_id"][sequences.of(1)[-1]]
    user = str(dataset.field2id_token["user_id"][1])
    (entry,) = opened.recommend([user], "retriever", "all")
    assert last not in entry.items


@pytest.mark.parametrize("system", ["conditional_logit", "conversion"])
def test_a_system_permutes_the_candidates(opened: OpenRun, system: str) -> None:
    before = opened.recommend(["u1", "u2", "u3"], "retriever")
    after = opened.recommend(["u1", "u2", "u3"], system)
    for one, two in zip(before, after, strict=True):
        assert set(one.items) == set(two.items)
        assert two.scores == one.scores  # the places', not the items': they fall with rank
        assert two.status in ("ok", "repaired", "fallback")
        assert bool(two.reason) == (two.status != "ok")
    assert opened.recommend(["u1", "u2", "u3"], system) == after  # LLMRank #7: the same lists again


def test_statuses() -> None:
    assert status_of(Ranking((1, 0), True, ())) == ("ok", "")
    assert status_of(Ranking((1, 0), False, ("omission",))) == ("repaired", "omission")
    assert status_of(Ranking((0, 1), False, ("duplicate", "omission"))) == ("repaired", "duplicate, omission")
    assert status_of(Ranking((0, 1), False, ("unparsed",))) == ("fallback", "unparsed")
    assert status_of(Ranking((1, 0), False, ("unparsed",))) == ("repaired", "unparsed")  # cut off, but read


def test_the_command(finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = [f"--run_dir={finished.folder}", "--system=retriever"]
    assert main([*start, "--users=u1,nobody"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["status"] for entry in entries] == ["ok", "missing"]
    (tmp_path / "users.txt").write_text("u3\n\nu4\n")
    assert main([*start, f"--users=@{tmp_path / 'users.txt'}", f"--output={tmp_path / 'a.csv'}"]) == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 2 * 6
    assert main([*start, "--users=all", f"--output={tmp_path / 'a.jsonl'}"]) == 0
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 60
    capsys.readouterr()
    (tmp_path / "nobody.txt").write_text("\n")
    for words, message in (
        ([f"--users=@{tmp_path / 'nobody.txt'}"], "nobody.txt is empty, expected one user a line"),
        (["--users=@absent.txt"], "users: no such file absent.txt"),
        (["--users=u1", f"--output={tmp_path / 'a.xlsx'}"], "unknown ending"),
    ):
        assert main([*start, *words]) == 2
        assert message in capsys.readouterr().err
    assert main([f"--run_dir={tmp_path}", "--users=u1"]) == 2
    assert "no run.json in it, expected the folder of a run" in capsys.readouterr().err


def test_a_run_can_be_moved(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "moved")
    expected = recommend(finished.folder, ["u1", "u5"])
    assert recommend(tmp_path / "moved", ["u1", "u5"]) == expected


def test_a_stage_of_other_parents_is_not_offered(finished: Finished, tmp_path: Path) -> None:
    """Distillation was trained again, so reinforcement belongs to weights that are gone."""
    shutil.copytree(finished.folder, tmp_path / "run")
    conversion, distillation = (tmp_path / "run" / stage for stage in ("conversion", "distillation"))
    shutil.copy(conversion / "model.safetensors", distillation)
    note, other = (json.loads((folder / INFO_FILE).read_text()) for folder in (distillation, conversion))
    (distillation / INFO_FILE).write_text(json.dumps({**note, "weights": other["weights"]}))
    opened = open_run(tmp_path / "run")
    assert opened.systems[-1] == "distillation"
    for ask in (
        lambda: opened.recommend(["u1"], "reinforcement"),
        lambda: opened.language_model("reinforcement"),
    ):
        with pytest.raises(
            ValueError, match=r"reinforcement was made from other weights than .*distillation holds"
        ):
            ask()
    assert opened.recommend(["u1"])[0].user_id == "u1"


def test_parents_that_are_gone_contradict_nothing(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ar_teacher")
    assert open_run(tmp_path / "run").systems[-1] == "reinforcement"


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ({"fact_levels": 3}, "fact_levels is 8, here 3"),
        ({"history_length": 3}, "history_length is 50, here 3"),
        ({"candidate_tokens": 60}, "candidate_tokens is None, here 60"),
        ({"history_tokens": 9}, "history_tokens is None, here 9"),
        ({"title_field": None}, "(item_text|fact_scale) is"),
    ],
)
def test_stages_of_other_prompts_are_refused(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], entry: str
) -> None:
    """A later run without stages writes another grounding and other options beside them."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.folder, tmp_path / "run")
    train_again(tmp_path, run_dir="run", stages=[], **keys)
    with pytest.raises(ValueError, match=f"was trained on other data: its {entry}"):
        recommend("run", ["u1"], system="conversion")
    with pytest.raises(ValueError, match=f"was trained on other data: its {entry}"):
        train_again(tmp_path, run_dir="run", stages=["distillation"], **keys)


@pytest.mark.parametrize(
    "name,message",
    [
        ("retriever/retriever.pth", r"retriever\.pth: no such file, so the run cannot be opened"),
        ("run.json", r"no run\.json in it"),
    ],
)
def test_a_run_that_lacks_a_file(finished: Finished, tmp_path: Path, name: str, message: str) -> None:
    shutil.copytree(finished.folder, tmp_path / "part")
    (tmp_path / "part" / name).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        open_run(tmp_path / "part")


def test_files_that_are_not_what_was_written(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "part")
    path = tmp_path / "part" / "run.json"
    content = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json: not valid JSON"):
        open_run(tmp_path / "part")
    path.write_text(json.dumps({**content, "format": 0}))
    with pytest.raises(ValueError, match="format 0, expected 1; run again"):
        open_run(tmp_path / "part")
    path.write_text(json.dumps({**content, "data": None}))
    with pytest.raises(ValueError, match=r"run\.json: data is None, expected dict; run again"):
        open_run(tmp_path / "part")
    path.write_text(json.dumps({**content, "data": {"toy.inter": "0" * 64}}))
    with pytest.raises(ValueError, match=r"toy\.inter: not the file the run was made with"):
        open_run(tmp_path / "part")


def test_a_candidate_file_instead_of_a_retriever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """RecBole #2014: rank recalled content. What a run exports is a retriever of its own, with the same figures."""
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, walks())
    before = run(folder)
    first = folder / "saved" / "own-ItemKNN-2020"
    assert main([f"--run_dir={first}", "--users=all", "--system=retriever", "--output=lists.csv"]) == 0
    after = run(folder, candidate_file="lists.csv", run_dir="out")
    assert after["retriever"] == "lists.csv"
    assert after["rows"] == before["rows"][:1]  # without training lists there is no second stage
    assert [floor["lists"] for floor in after["floors"]] == [12, 12, 12]
    Path("lists.csv").unlink()
    users = [f"u{n}" for n in range(12)]
    found, expected = recommend("out", users), recommend(first, users, system="retriever")
    assert [entry.items for entry in found] == [entry.items for entry in expected]
    (tmp_path / "few.jsonl").write_text('{"user_id": "u1", "items": ["i1", "i12", "i19", "i0"]}\n')
    with caplog.at_level(logging.WARNING):
        few = run(folder, candidate_file="few.jsonl", run_dir="few")
    assert "few.jsonl: of 12 test users 11 have no candidates and 1 fewer than" in caplog.text
    assert few["n_users"] == 12
    assert few["floors"][2]["hits"] <= 1
    assert recommend("few", ["u2"], system="retriever")[0].status == "missing"


@pytest.mark.parametrize("name", ["lists.csv", "lists.jsonl"])
def test_a_new_order_survives_the_way_through_a_file(here: Path, name: str) -> None:
    """What a second stage ranked is read back as it ranked it, by this program and by any that sorts by score."""
    folder = write(here, walks())
    run(folder)
    opened = open_run(folder / "saved" / "own-ItemKNN-2020")
    before, after = (
        opened.recommend(opened.users(), system) for system in ("retriever", "conditional_logit")
    )
    assert [entry.items for entry in before] != [entry.items for entry in after]
    write_lists(after, Path(name))
    dataset = opened.data.dataset
    user_ids, item_ids = (dict(dataset.field2token_id[field]) for field in ("user_id", "item_id"))
    read = read_candidate_file(Path(name), user_ids, item_ids).lists["test"]
    for entry in after:
        found, scores = read[user_ids[entry.user_id]]
        assert tuple(dataset.field2id_token["item_id"][found]) == entry.items
        assert (np.diff(scores) < 0).all()


def test_seeds_decide_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, walks())
    lists = []
    for cache in ("one", "two"):
        run(folder, retriever="BPR", embedding_size=8, epochs=2, cache_dir=cache, run_dir=f"run-{cache}")
        lists.append(recommend(f"run-{cache}", [f"u{n}" for n in np.arange(12)], system="retriever"))
    assert lists[0] == lists[1]
