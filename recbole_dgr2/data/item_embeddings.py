"""Item embeddings from which semantic IDs are made: of item text, of a retriever, or of a sentence encoder.

Every function returns float32 [n_items, d] by internal id; rows have length 1, so that near means a high cosine, and
row 0 (padding) is zero. An item of which nothing is known (no text; a zero row of the retriever) gets the mean of the
others, brought to length 1: it lies in the middle and is told from its like by the last level alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from recbole_dgr2.data.item_text import ItemText

DIMENSIONS = 128
"""Dimensions of text embeddings; fewer where the text has fewer different words or the catalogue fewer items."""


def embed_text(item_text: ItemText, seed: int, dimensions: int = DIMENSIONS) -> np.ndarray:
    """TF-IDF of title, categories and brand, reduced by a truncated SVD.

    Args:
        item_text: texts of all items, padding included.
        seed: of the randomised SVD.
        dimensions: of the embedding.

    Raises:
        ValueError: no item has a word of text.
    """
    documents = _documents(item_text)
    counts = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    try:
        weights = counts.fit_transform(documents)
    except ValueError as error:  # scikit-learn's word for a vocabulary without words
        raise ValueError(_no_text()) from error
    width = min(dimensions, weights.shape[1] - 1, len(documents) - 1)
    if width < 1:
        return unit_rows(weights.toarray())
    return unit_rows(TruncatedSVD(width, random_state=seed).fit_transform(weights))


def embed_sentences(item_text: ItemText, folder: Path, progress: bool = False) -> np.ndarray:
    """Embeddings of item text by a sentence-transformers model in a local folder.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: the package is not installed, the folder holds no such model, or no item has text.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"sid_embeddings: no folder {folder}; expected text, retriever, or the folder of a sentence-transformers "
            "model"
        )
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(
            f"sid_embeddings {str(folder)!r}: the package sentence-transformers is not installed; "
            "run pip install sentence-transformers, or set sid_embeddings=text"
        ) from error
    documents = _documents(item_text)
    known = [item for item, text in enumerate(documents) if text]
    if not known:
        raise ValueError(_no_text())
    try:
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"sid_embeddings {str(folder)!r}: no sentence-transformers model ({reason})"
        ) from error
    encoded: Any = model.encode([documents[item] for item in known], show_progress_bar=progress)
    vectors = np.zeros((len(documents), np.shape(encoded)[1]), dtype=np.float32)
    vectors[known] = encoded
    return unit_rows(vectors)


def embed_table(table: np.ndarray, n_items: int) -> np.ndarray:
    """The item embeddings of a retriever, brought to length 1: popularity, which sits in the length, is left out.

    Args:
        table: [>= n_items, d] by internal id; rows beyond the items (a mask token's) are left out.
        n_items: items, padding included.

    Raises:
        ValueError: too few rows, or a value that is not finite.
    """
    if table.ndim != 2 or len(table) < n_items:
        raise ValueError(f"item embeddings: expected [>= {n_items}, d], got {list(table.shape)}")
    if not np.isfinite(table[:n_items]).all():
        raise ValueError("item embeddings: NaN or infinite values; lower the retriever's learning_rate")
    return unit_rows(table[:n_items])


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, float32; zero rows get the mean direction, row 0 is zero."""
    vectors = np.array(vectors, dtype=np.float32)
    vectors[0] = 0.0
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors /= np.where(lengths > 0, lengths, 1.0)
    unknown = lengths[:, 0] == 0
    if not unknown.all():
        middle = vectors[~unknown].mean(axis=0)
        vectors[unknown] = middle / max(float(np.linalg.norm(middle)), 1e-12)
    vectors[0] = 0.0
    return vectors


def _documents(item_text: ItemText) -> list[str]:
    return ["", *(item_text.document(item) for item in range(1, len(item_text)))]


def _no_text() -> str:
    return (
        "sid_embeddings text: no item has text; set title_field, category_field or brand_field to columns of the .item "
        "file, or set sid_embeddings=retriever"
    )
