"""Semantic IDs of a run's items: read from an index file, found in the cache, or made, and kept in the run's folder."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recbole_dgr2.config import Config
from recbole_dgr2.data.item_embeddings import embed_sentences, embed_table, embed_text
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.quantized import CodeOptions, Quantized
from recbole_dgr2.data.residual_kmeans import residual_kmeans
from recbole_dgr2.data.rqvae import rqvae
from recbole_dgr2.data.semantic_id import PADDING, SemanticIds, read_index, spelling_of, write_index
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import Data, Host
from recbole_dgr2.pipeline.retrieval import RetrieverStore
from recbole_dgr2.pipeline.views import SidOptions
from recbole_dgr2.schema import nearest
from recbole_dgr2.system.cache import Cache, Columns, digest_of, file_digest
from recbole_dgr2.utils import item_tokens

QUANTIZERS: dict[str, Callable[[np.ndarray, CodeOptions], Quantized]] = {
    "kmeans": residual_kmeans,
    "rqvae": rqvae,
}

INDEX_FILE = "semantic_ids.json"
"""Index file in the folder of a run."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Embedder:
    """Item embeddings float32 [n_items, d], and what decides them, as JSON values."""

    description: dict[str, Any]
    embed: Callable[[], np.ndarray]


@dataclass(frozen=True)
class MadeIds:
    """Semantic IDs, and the last code of every item, int64 [n_items - 1], before it was made unique."""

    sids: SemanticIds
    last_before: np.ndarray


def embedder_of(options: SidOptions, item_text: ItemText, store: RetrieverStore | None) -> Embedder:
    """Item embeddings as `options.embeddings` says; nothing is computed yet.

    Raises:
        ValueError: the retriever's are wanted and there is none (`store` None).
        FileNotFoundError: no such folder of an encoder.
    """
    documents = [item_text.document(item) for item in range(1, len(item_text))]
    description: dict[str, Any] = {"kind": options.embeddings, "text": digest_of(documents)}
    if options.embeddings == "text":
        return Embedder(description, lambda: embed_text(item_text, options.seed))
    if options.embeddings == "retriever":
        if store is None:
            raise ValueError(
                "sid_embeddings retriever: the candidates come from candidate_file, and no retriever is known; set "
                "sid_embeddings=text"
            )
        table = embed_table(store.final().item_table(), len(item_text))
        digest = hashlib.sha256(table.tobytes()).hexdigest()
        return Embedder({"kind": "retriever", "table": digest}, lambda: table)
    folder = Path(options.embeddings)
    if not folder.is_dir():
        near = nearest(options.embeddings, ("text", "retriever"))
        hint = f"; did you mean {near!r}?" if near else ""
        raise FileNotFoundError(
            f"sid_embeddings: no folder {folder}, expected text, retriever, or the folder of a sentence-transformers "
            f"model{hint}"
        )
    files = {str(path.relative_to(folder)): file_digest(path) for path in _files(folder)}
    return Embedder(
        description | {"files": files}, lambda: embed_sentences(item_text, folder, options.progress)
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_semantic_ids(
    options: SidOptions, data: Data, embedder_of_items: Callable[[], Embedder], cache: Cache
) -> MadeIds:
    """Semantic IDs of all items, read from an index file, found in the cache, or made now.

    `embedder_of_items` is called unless there is an index file: it may train a retriever.

    Raises:
        ValueError, FileNotFoundError: no such source; see `read_index`.
    """
    assert options.source is not None
    tokens = item_tokens(data.dataset)
    if options.source not in QUANTIZERS:
        sids = read_index(_index_file(options.source), tokens)
        return MadeIds(sids, sids.codes[1:, -1])
    spelling, embedder = spelling_of(options.levels), embedder_of_items()

    def build() -> Columns:
        start = time.process_time()
        code_options = CodeOptions(options.levels, options.codes, options.seed, options.progress)
        found = QUANTIZERS[options.source or ""](embedder.embed()[1:], code_options)
        codes = found.unique_codes(options.codes)
        logger.info("semantic IDs: %s took %.1f CPU s", options.source, time.process_time() - start)
        columns = {f"code{level}": code for level, code in enumerate(codes.T)}
        return {**columns, "last_before": found.codes[:, -1]}

    shape = {"levels": options.levels, "codes": options.codes, "seed": options.seed}
    whole = {"quantizer": options.source, **shape, "embeddings": embedder.description}
    columns = cache.table("semantic-ids", whole, build)
    codes = np.full((len(tokens), options.levels), PADDING, dtype=np.int64)
    codes[1:] = np.stack([columns[f"code{level}"] for level in range(options.levels)], axis=1)
    return MadeIds(SemanticIds(codes, spelling), columns["last_before"])


def _index_file(source: str) -> Path:
    path = Path(source)
    if path.is_file() or path.suffix == ".json":
        return path
    near = nearest(source, QUANTIZERS)
    hint = f"; did you mean {near!r}?" if near else ""
    raise FileNotFoundError(
        f"semantic_ids: {source!r} is neither {' nor '.join(QUANTIZERS)} nor an index file{hint}"
    )


def check_semantic_ids(config: Config, data: Data) -> None:
    """Raise what `add_semantic_ids` would, as far as it can be known before a retriever is trained."""
    options = views.sid_options(config)
    if options.source is not None and options.source not in QUANTIZERS:
        read_index(_index_file(options.source), item_tokens(data.dataset))
    elif options.source is not None and options.embeddings != "retriever":
        embedder_of(options, data.item_text, None)


def add_semantic_ids(config: Config, data: Data, origin: tuple[Host, Cache], folder: Path) -> Data:
    """The data set with the semantic IDs that the config asks for, which are also written to the run's `folder`.

    Args:
        config, data: the run.
        origin: whose retriever, and where semantic IDs are kept.
        folder: of the run.

    Raises:
        ValueError, FileNotFoundError: as `embedder_of` and `make_semantic_ids`.
    """
    options, (host, cache) = views.sid_options(config), origin
    if options.source is None:
        return data
    made = make_semantic_ids(options, data, lambda: embedder_of(options, data.item_text, host.store), cache)
    write_index(folder / INDEX_FILE, made.sids, item_tokens(data.dataset))
    return _with_sids(data, made.sids)


def read_semantic_ids(config: Config, data: Data, folder: Path) -> Data:
    """The data set of a finished run in `folder`, with the semantic IDs it was made with."""
    if views.sid_options(config).source is None:
        return data
    return _with_sids(data, read_index(folder / INDEX_FILE, item_tokens(data.dataset)))


def _with_sids(data: Data, sids: SemanticIds) -> Data:
    return replace(data, sids=sids, item_text=replace(data.item_text, sids=sids.texts()))
