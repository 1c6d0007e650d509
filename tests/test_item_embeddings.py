"""Item embeddings: like items lie near one another, items without anything lie in the middle, bad input is named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.data.item_embeddings import embed_sentences, embed_table, embed_text, unit_rows
from recbole_dgr2.data.item_text import ItemText


def items(*titles: str) -> ItemText:
    """Padding first; every item of no category and brand."""
    named = ("", *titles)
    return ItemText(named, ((),) * len(named), ("",) * len(named))


NAILS = ("red nail polish", "blue nail polish", "nail polish remover")
HAIR = ("hair shampoo mint", "hair shampoo dry", "hair dryer")


def test_items_with_like_text_are_near() -> None:
    vectors = embed_text(items(*NAILS, *HAIR), seed=0, dimensions=3)[1:]
    cosine = vectors @ vectors.T
    assert cosine[:3, :3].min() > cosine[:3, 3:].max()
    assert cosine[3:, 3:].min() > cosine[:3, 3:].max()
    assert vectors.dtype == np.float32 and vectors.shape == (6, 3)


def test_the_same_seed_gives_the_same() -> None:
    text = items(*NAILS, *HAIR)
    assert np.array_equal(embed_text(text, 3), embed_text(text, 3))


def test_items_without_text_lie_in_the_middle_and_padding_at_zero() -> None:
    vectors = embed_text(items(*NAILS, "", *HAIR, ""), seed=0)
    assert not vectors[0].any()
    assert np.allclose(np.linalg.norm(vectors[1:], axis=1), 1, atol=1e-5)
    assert np.array_equal(vectors[4], vectors[8])
    known = vectors[[1, 2, 3, 5, 6, 7]].mean(axis=0)
    assert np.allclose(vectors[4], known / np.linalg.norm(known), atol=1e-5)


def test_one_item_and_one_word_are_enough() -> None:
    assert np.allclose(embed_text(items("lamp"), 0)[1], 1.0)
    assert embed_text(items("lamp", "lamp"), 0).shape == (3, 1)


def test_no_text_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no item has text; set title_field") as caught:
        embed_text(items("", ""), 0)
    assert "\n" not in str(caught.value)


def test_a_table_loses_lengths_and_surplus_rows() -> None:
    table = np.array([[9.0, 9.0], [3.0, 4.0], [0.0, 2.0], [5.0, 5.0]])
    assert np.allclose(embed_table(table, 3), np.array([[0, 0], [0.6, 0.8], [0, 1]]))


@pytest.mark.parametrize(
    ("table", "message"),
    [(np.zeros((2, 3)), r"expected \[>= 3, d\]"), (np.array([[0.0], [np.nan], [1.0]]), "NaN or infinite")],
)
def test_bad_tables(table: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed_table(table, 3)


def test_all_zero_rows_stay_finite() -> None:
    assert not unit_rows(np.zeros((3, 2))).any()


class Encoder:
    """Stands for a sentence encoder: one dimension a word it knows."""

    def __init__(self, folder: str, device: str, local_files_only: bool) -> None:
        if not (Path(folder) / "modules.json").is_file():
            raise OSError(f"{folder} holds no model")
        assert local_files_only and device == "cpu"

    def encode(self, texts: list[str], show_progress_bar: bool) -> Any:
        assert all(texts)
        return np.array([[text.count("nail"), text.count("hair")] for text in texts], dtype=np.float32)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("sentence_transformers")
    module.SentenceTransformer = Encoder
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


@pytest.mark.usefixtures("encoder")
def test_a_sentence_encoder(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    vectors = embed_sentences(items("nail", "", "hair"), tmp_path)
    half = 0.5**0.5
    assert np.allclose(vectors, np.array([[0, 0], [1, 0], [half, half], [0, 1]]))
    with pytest.raises(ValueError, match="no item has text"):
        embed_sentences(items(""), tmp_path)


@pytest.mark.usefixtures("encoder")
def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no sentence-transformers model \(.* holds no model\)"):
        embed_sentences(items("nail"), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing; expected text, retriever"):
        embed_sentences(items("nail"), tmp_path / "missing")


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match="pip install sentence-transformers, or set sid_embeddings=text"):
        embed_sentences(items("nail"), tmp_path)
