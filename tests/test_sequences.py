"""Sequences and rows: hand-computed values, RecBole's own split, properties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recbole.data import data_preparation

from recbole_dgr2.data.sequences import Rows, Sequences, leave_one_out_rows
from recbole_dgr2.utils import load_dataset, sequences_from_dataset
from tests.recsys import recbole_config, write_interactions


def make(*items: list[int], n_items: int = 50) -> Sequences:
    offsets = np.cumsum([0, *map(len, items)]).astype(np.int64)
    return Sequences(
        len(items), n_items, offsets, np.array([i for user in items for i in user], dtype=np.int64)
    )


FIVE = make([], [1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11], [12, 13, 14, 15])


def test_of_and_lengths() -> None:
    assert FIVE.of(1).tolist() == [1, 2, 3, 4, 5]
    assert FIVE.lengths.tolist() == [0, 5, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"user 6: unknown.*0\.\.5"):
        FIVE.of(6)


def test_truncate_and_without_last() -> None:
    cut = FIVE.truncate(np.array([0, 2, 5, 0, 1, 4]))
    assert [cut.of(u).tolist() for u in range(6)] == [[], [1, 2, 3], [], [7, 8], [9, 10], []]
    kept = FIVE.without_last(3)
    assert [kept.of(u).tolist() for u in range(6)] == [[], [1, 2], [6], [7], [9], [12]]
    assert FIVE.without_last(1, keep=4).lengths.tolist() == [0, 4, 1, 2, 3, 4]


def test_rows_by_hand() -> None:
    test = leave_one_out_rows(FIVE, "test")
    assert test.users.tolist() == [1, 4, 5]
    assert test.targets(FIVE).tolist() == [5, 11, 15]
    assert [h.tolist() for h in test.histories(FIVE, 2)] == [[3, 4], [9, 10], [13, 14]]
    assert [h.tolist() for h in test.histories(FIVE)] == [[1, 2, 3, 4], [9, 10], [12, 13, 14]]
    valid = leave_one_out_rows(FIVE, "valid")
    assert (valid.users.tolist(), valid.targets(FIVE).tolist()) == ([1, 5], [4, 14])
    train = leave_one_out_rows(FIVE, "train", last_m=2)
    assert (train.users.tolist(), train.ends.tolist()) == ([1, 1, 3, 4, 5], [1, 2, 1, 1, 1])
    assert train.targets(FIVE).tolist() == [2, 3, 8, 10, 13]
    assert leave_one_out_rows(FIVE, "train", last_m=1).ends.tolist() == [2, 1, 1, 1]
    assert train.take(slice(1, 3)).users.tolist() == [1, 3]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_rows_keep_the_phases_apart(lengths: list[int], last_m: int) -> None:
    sequences = make(*[[i + 1 for i in range(n)] for n in lengths])
    places = {}
    for phase in ("train", "valid", "test"):
        rows = leave_one_out_rows(sequences, phase, last_m)  # type: ignore[arg-type]
        assert (rows.ends >= 1).all()
        rows.targets(sequences)
        places[phase] = set(zip(rows.users.tolist(), rows.ends.tolist(), strict=True))
        assert len(places[phase]) == len(rows)
    assert not (places["train"] & places["valid"] or places["train"] & places["test"])
    assert not places["valid"] & places["test"]
    held = sequences.truncate(sequences.lengths - sequences.training_lengths()).without_last(last_m)
    assert all(end >= len(held.of(user)) for user, end in places["train"])


@pytest.mark.parametrize("phase,index", [("train", 0), ("valid", 1), ("test", 2)])
def test_rows_are_recboles_sequential_rows(tmp_path: Path, phase: str, index: int) -> None:
    lengths = [1, 2, 3, 4, 5, 9, 12, 3, 2, 20, 7]
    config = recbole_config("SASRec", write_interactions(tmp_path, lengths, 40))
    dataset = load_dataset(config)
    sequences = sequences_from_dataset(dataset)
    split = data_preparation(config, dataset)[index].dataset
    feat = split.inter_feat
    rows = leave_one_out_rows(sequences, phase, last_m=99)  # type: ignore[arg-type]
    ours = {
        (u, e): (t, h.tolist())
        for u, e, t, h in zip(
            rows.users.tolist(),
            rows.ends.tolist(),
            rows.targets(sequences).tolist(),
            rows.histories(sequences, 6),
            strict=True,
        )
    }
    theirs = {}
    for i in range(len(feat)):
        row = feat[i]
        user, size = int(row["user_id"]), int(row["item_length"])
        history = row["item_id_list"][:size].tolist()
        end = next(e for (u, e), (t, h) in ours.items() if u == user and t == int(row["item_id"]))
        theirs[user, end] = (int(row["item_id"]), history)
    assert ours == theirs


def test_a_training_split_gives_the_training_sequences(tmp_path: Path) -> None:
    config = recbole_config("SASRec", write_interactions(tmp_path, [2, 3, 4, 12, 20], 40))
    dataset = load_dataset(config)
    whole = sequences_from_dataset(dataset)
    train = data_preparation(config, dataset)[0].dataset
    expected = whole.truncate(whole.lengths - whole.training_lengths())
    found = sequences_from_dataset(train)
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert found.items.tolist() == expected.items.tolist()


def test_times_closer_than_float32_keep_file_order(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    lines += [f"u\ti{i}\t{1_400_000_000 - i}" for i in range(5)] + [
        "u\tlast\t1400001000",
        "u\tfirst\t1399990000",
    ]
    (tmp_path / "small" / "small.inter").write_text("\n".join(lines) + "\n")
    config = recbole_config("SASRec", tmp_path)
    dataset = load_dataset(config)
    tokens = dataset.field2id_token["item_id"]
    items = [tokens[i] for i in sequences_from_dataset(dataset).of(1)]
    assert items == ["first", "i0", "i1", "i2", "i3", "i4", "last"]


@pytest.mark.parametrize(
    "offsets,items,message",
    [
        ([0, 1], [1], "offsets: expected"),
        ([0, 2, 1], [1], "expected to rise"),
        ([0, 1, 2], [1, 0], r"items: expected ids in 1\.\.4"),
        ([0, 1, 2], [1, 5], r"items: expected ids in 1\.\.4"),
    ],
)
def test_bad_sequences(offsets: list[int], items: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sequences(2, 5, np.array(offsets), np.array(items))


def test_bad_rows() -> None:
    with pytest.raises(ValueError, match="user 9: unknown"):
        Rows(np.array([9]), np.array([1])).histories(FIVE, 3)
    with pytest.raises(ValueError, match="user 1: a row ends at 5, but the user has 5"):
        Rows(np.array([1]), np.array([5])).targets(FIVE)
    with pytest.raises(ValueError, match="got 2 and 1"):
        Rows(np.array([1, 2]), np.array([5]))
    with pytest.raises(ValueError, match="last_m 0"):
        leave_one_out_rows(FIVE, "train", 0)
    with pytest.raises(ValueError, match="phase 'dev'"):
        leave_one_out_rows(FIVE, "dev")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drop"):
        FIVE.truncate(np.array([1]))
