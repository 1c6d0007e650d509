"""Bad input: for each kind a clear error or a stated rule.

Users of fewer than three interactions have no test row, but are trained on and can be asked for. Equal rows of .inter
count as often as they stand there. Equal times keep the file's order. Items without a row in .item have no text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recbole_dgr2.data.candidates import HeadOptions, build_candidates
from recbole_dgr2.data.item_text import ItemFields, load_item_text
from recbole_dgr2.data.sequences import leave_one_out_rows
from recbole_dgr2.model.scorer import Retriever
from recbole_dgr2.recommend import recommend
from recbole_dgr2.scale import synthetic_sequences
from tests.atomic import Interaction, run, walks, write

ITEM_HEAD = "item_id:token\ttitle:token_seq"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_dir(folder: Path) -> Path:
    return folder / "saved" / "own-ItemKNN-2020"


def test_users_of_one_and_two_interactions(tmp_path: Path) -> None:
    short: list[Interaction] = [("one", "i1", 1), ("two", "i1", 1), ("two", "i2", 2)]
    short += [("three", f"i{n}", n) for n in (1, 2, 3)]
    report = run(write(tmp_path, walks() + short))
    assert report["n_users"] == 12 + 1  # of the short ones only "three" has a test row
    lists = recommend(run_dir(tmp_path), ["one", "two", "three"], system="retriever")
    assert [entry.status for entry in lists] == ["ok"] * 3
    assert "i1" not in lists[0].items
    assert not {"i1", "i2"} & set(lists[1].items)


def test_no_user_with_a_test_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no user has three interactions") as caught:
        run(
            write(tmp_path, [("a", "i1", 1), ("b", "i2", 1), ("c", "i1", 3)]),
            n_candidates=2,
            topk=[1],
            valid_metric="NDCG@1",
        )
    assert "\n" not in str(caught.value)


def test_the_same_interaction_twice(tmp_path: Path) -> None:
    rows = walks()
    report = run(write(tmp_path, [*rows, rows[0], rows[30]]))
    assert report["n_users"] == 12


def test_unsorted_times_are_sorted(tmp_path: Path) -> None:
    rows = walks()
    shuffled = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    sorted_report = run(write(tmp_path / "a", rows))
    # ids follow the order of appearance, so candidates of equal score may differ; targets and lengths may not
    report = run(write(tmp_path / "b", shuffled))
    assert report["n_users"] == sorted_report["n_users"]
    one = recommend(run_dir(tmp_path / "a"), ["u3"], system="retriever")[0]
    two = recommend(run_dir(tmp_path / "b"), ["u3"], system="retriever")[0]
    assert one.scores == pytest.approx(two.scores)


@pytest.mark.parametrize(
    "head,rows,message",
    [
        ("user_id:token\titem_id:token", [row[:2] for row in walks()], "no column 'timestamp'"),
        (
            "user_id:token\titem_id:token\ttimestamp:float",
            [(user, item, "" if place == 4 else time) for place, (user, item, time) in enumerate(walks())],
            None,
        ),
    ],
    ids=["column", "cell"],
)
def test_missing_times(tmp_path: Path, head: str, rows: list[tuple[Any, ...]], message: str | None) -> None:
    """Without the column: an error. A missing cell is filled with the mean of the others, RecBole's rule."""
    folder = write(tmp_path, rows, head=head)
    if message is None:
        assert run(folder)["n_users"] == 12
        return
    with pytest.raises(ValueError, match=message):
        run(folder)


def test_ids_with_spaces_and_of_any_script(tmp_path: Path) -> None:
    names = {"u1": "Анна Каренина", "u2": "用户 二", "i3": 'item, with "quotes" no', "i4": "é́"}
    names["i3"] = "крем для рук"
    rows = [(names.get(user, user), names.get(item, item), time) for user, item, time in walks()]
    run(write(tmp_path, rows))
    lists = recommend(run_dir(tmp_path), ["Анна Каренина", "用户 二"], system="retriever")
    assert [entry.user_id for entry in lists] == ["Анна Каренина", "用户 二"]
    assert [entry.status for entry in lists] == ["ok", "ok"]
    everything = recommend(
        run_dir(tmp_path), [names.get(f"u{n}", f"u{n}") for n in range(12)], system="retriever"
    )
    assert any("крем для рук" in entry.items for entry in everything)


def test_float_ids_stay_the_text_they_are(tmp_path: Path) -> None:
    rows = [
        (user.replace("u", "") + ".0", item.replace("i", "") + ".0", time) for user, item, time in walks()
    ]
    run(write(tmp_path, rows, [ITEM_HEAD, *(f"{n}.0\ttitle {n}" for n in range(20))]), title_field="title")
    (found,) = recommend(run_dir(tmp_path), ["3.0"], system="retriever")
    assert all(item.endswith(".0") for item in found.items)
    assert recommend(run_dir(tmp_path), [3], system="retriever")[0].reason.startswith("unknown user")


TITLES = {
    '"Foo" bar': '"Foo" bar',
    'an "unbalanced quote': 'an "unbalanced quote',
    '"leading unbalanced': '"leading unbalanced',
    "naïve 🌹 розы": "naïve 🌹 розы",
    "": "",
    "  spaces  ": "spaces",
    "NA": "NA",
}


@pytest.mark.parametrize("title", TITLES)
def test_titles(tmp_path: Path, title: str) -> None:
    """RecBole #2017, #2125: quotes, emoji and empty titles are text like any other."""
    path = tmp_path / "x.item"
    path.write_text(f"{ITEM_HEAD}\na\t{title}\nb\tplain\n", encoding="utf-8")
    text = load_item_text(path, ItemFields(title="title"), ["[PAD]", "a", "b"])
    assert text.titles[1:] == (TITLES[title], "plain")


def test_a_tab_in_a_title(tmp_path: Path) -> None:
    """In quotes a tab is text; without them the line has a column too many, which is an error."""
    path = tmp_path / "x.item"
    path.write_text(f'{ITEM_HEAD}\na\t"one\ttwo"\nb\tplain\n', encoding="utf-8")
    assert load_item_text(path, ItemFields(title="title"), ["[PAD]", "a", "b"]).titles[1] == "one\ttwo"
    path.write_text(f"{ITEM_HEAD}\na\tone\ttwo\nb\tplain\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.item: not a table of tab-separated columns"):
        load_item_text(path, ItemFields(title="title"), ["[PAD]", "a", "b"])


def test_an_empty_item_file(tmp_path: Path) -> None:
    folder = write(tmp_path, walks(), [])
    with pytest.raises(ValueError, match=r"own\.item: the file is empty"):
        run(folder, title_field="title")
    assert run(folder, title_field=None)["n_users"] == 12  # nothing of it is read


def test_an_item_without_a_row_in_the_item_file(tmp_path: Path) -> None:
    lines = [ITEM_HEAD, *(f"i{n}\tname {n}" for n in range(20) if n != 7), "unused\tnobody bought it"]
    assert run(write(tmp_path, walks(), lines), title_field="title")["n_users"] == 12


def scores_with(value: float, place: int = 3) -> Retriever:
    class Broken(Retriever):
        def __init__(self) -> None:
            pass

        name = "Broken"  # type: ignore[assignment]

        def score(self, users: np.ndarray, histories: list[np.ndarray]) -> torch.Tensor:
            scores = torch.rand(len(users), 31)
            scores[:, place] = value
            self._check_finite(scores[:, 1:], users)
            return scores

    return Broken()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers(value: float) -> None:
    sequences = synthetic_sequences(6, 30)
    rows = leave_one_out_rows(sequences, "test")
    with pytest.raises(ValueError, match=r"Broken: NaN or infinite scores \(first for user 1"):
        build_candidates(scores_with(value).score, rows, sequences, HeadOptions(5, 5, True))
    found = build_candidates(scores_with(-float("inf")).score, rows, sequences, HeadOptions(5, 5, True))
    assert not (found.ids == 3).any()


def test_fewer_valid_items_than_n(tmp_path: Path) -> None:
    """A user who knows nearly everything gets the few that are left; padding follows, and nothing breaks."""
    known: list[Interaction] = [("all", f"i{n}", n) for n in range(19)]
    report = run(write(tmp_path, walks() + known))
    assert report["n_users"] == 13
    (entry,) = recommend(run_dir(tmp_path), ["all"], system="retriever")
    assert 1 <= len(entry.items) < 5
    everything: list[Interaction] = [("all", f"i{n}", n) for n in range(20)]
    with pytest.raises(ValueError, match="Some users have interacted with all items"):  # RecBole's own
        run(write(tmp_path / "b", walks() + everything))


def test_more_candidates_than_items(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_candidates 21: the catalogue has 20 items"):
        run(write(tmp_path, walks()), n_candidates=21)


def test_counts_that_are_not_the_expected_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RecBole #1648: with one interval only, the 5-core of Beauty has other counts; that is said."""
    folder = write(tmp_path, walks())
    with caplog.at_level(logging.INFO):
        run(folder, expected_counts=[12, 20, 84])
    assert "own: 12 users, 20 items, 84 interactions" in caplog.text
    assert "expected;" not in caplog.text
    with caplog.at_level(logging.INFO):
        run(folder, expected_counts=[22363, 12101, 198502])
    assert "22,363 users, 12,101 items, 198,502 interactions expected;" in caplog.text
