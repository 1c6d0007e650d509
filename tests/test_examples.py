"""Examples and their batches."""

from __future__ import annotations

import pytest

from recbole_dgr2.data.examples import Example, collate

ONE, TWO = Example(7, (5, 6, 7), (8, 9, 1), 1), Example(3, (4,), (2,), 1)


def test_batch_by_hand() -> None:
    batch = collate([ONE, TWO], pad_id=1)
    assert batch.keys.tolist() == [7, 3]
    assert batch.prompt.tolist() == [[5, 6, 7], [4, 1, 1]] and batch.prompt_length.tolist() == [3, 1]
    assert batch.response.tolist() == [[8, 9, 1], [2, 1, 1]] and batch.response_length.tolist() == [3, 1]
    assert batch.answer.tolist() == [[False, True, True], [False, False, False]]
    assert batch.to("cpu").prompt.tolist() == batch.prompt.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": -1}, "key -1"),
        ({"prompt_ids": ()}, "prompt has no tokens"),
        ({"response_ids": ()}, "response has no tokens"),
        ({"answer_start": 4}, "answer_start 4, expected 0..3"),
    ],
)
def test_bad_example(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Example(**{**vars(ONE), **changes})  # type: ignore[arg-type]


def test_empty_batch() -> None:
    with pytest.raises(ValueError, match="at least one example"):
        collate([], 0)
