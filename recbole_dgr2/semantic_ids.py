"""Semantic IDs of a data set: made, measured, and written to an index file.

python -m recbole_dgr2.semantic_ids --dataset=Amazon_Beauty --tokenizer_kind=rqvae --output=saved/beauty.sid.json

Prints a table of figures and writes them beside the index file, as `<name>.figures.json`. Other options of a run
(--data_path=..., --retriever=BPR --embeddings=retriever) are --key=value words; --tokenizer_kind also takes the path of
an index file, to measure what somebody else has made. `semantic_ids=<file>` makes a run use an index file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from recbole_dgr2.config import Config
from recbole_dgr2.data.item_embeddings import embed_sentences, embed_table, embed_text
from recbole_dgr2.data.item_text import ItemText
from recbole_dgr2.data.quantized import CodeOptions, Quantized
from recbole_dgr2.data.residual_kmeans import residual_kmeans
from recbole_dgr2.data.rqvae import rqvae
from recbole_dgr2.data.semantic_id import PADDING, SemanticIds, read_index, spelling_of, write_index
from recbole_dgr2.data.sid_quality import SidQuality, sid_quality
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import Data, Host, load_data
from recbole_dgr2.pipeline.retrieval import RetrieverStore
from recbole_dgr2.pipeline.views import SidOptions
from recbole_dgr2.schema import nearest
from recbole_dgr2.system.cache import Cache, Columns, data_fingerprint, digest_of, file_digest, write_text
from recbole_dgr2.system.command import Arguments, command, command_parser
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


def measure(made: MadeIds, data: Data, vectors: np.ndarray, seed: int) -> SidQuality:
    """Figures of semantic IDs; `vectors` are the item embeddings, padding first."""
    codes, categories = made.sids.codes[1:], data.item_text.categories[1:]
    return sid_quality(codes, made.last_before, vectors[1:], categories, seed)


def quality_table(quality: SidQuality, title: str) -> Table:
    """The figures as a table, one row a level."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    heads = ("prefix", "unique", "codes used", "entropy", "perplexity")
    for head in (*heads, "10 nearest share it", "(random pairs)", "mates: category", "narrowest"):
        table.add_column(head, justify="right")
    for level, row in enumerate(quality.levels, 1):
        shares = (row.neighbours, row.random_pairs, row.category, row.narrowest)
        figures = (f"{row.codes}", f"{row.entropy:.2f} bit", f"{row.perplexity:.0f}")
        table.add_row(
            str(level), _percent(row.unique), *figures, *(_percent(share, digits=1) for share in shares)
        )
    table.caption = (
        f"{quality.items:,} items, {quality.unique:.2%} unique; {quality.collisions:,} shared their code before the "
        f"last level was made unique, {quality.moved:,} were given another. Of the 10 nearest items "
        f"{_percent(quality.neighbours_category, 1)} have the same category."
    )
    return table


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def run_command(config: Config, output: Path, console: Console) -> SidQuality:
    """Make, measure, print and write the semantic IDs of a config's data set."""
    options, candidates = views.sid_options(config), views.candidate_options(config)
    folder = views.run_options(config).data_folder
    data = load_data(config, folder, views.prompt_options(config))
    cache, store = Cache(candidates.cache), None
    if candidates.file is None:
        fingerprint = data_fingerprint(folder, config["dataset"])
        store = RetrieverStore(config, candidates, cache, fingerprint, data.dataset)
    embedder = embedder_of(options, data.item_text, store)
    made = make_semantic_ids(options, data, lambda: embedder, cache)
    quality = measure(made, data, embedder.embed(), options.seed)
    write_index(output, made.sids, item_tokens(data.dataset))
    content = {"dataset": config["dataset"], "options": vars(options), "figures": quality.to_dict()}
    write_text(figures_file(output), json.dumps(content, indent=1) + "\n")
    console.print(quality_table(quality, f"{config['dataset']}, {options.source}, {options.embeddings}"))
    return quality


def figures_file(output: Path) -> Path:
    """Where the figures of an index file go: `x.json` has `x.figures.json`."""
    return output.with_name(f"{output.name.removesuffix('.json')}.figures.json")


@command
def main(arguments: Arguments = None) -> None:
    """Run the command line."""
    parser = command_parser("semantic_ids", __doc__)
    parser.add_argument("--dataset", required=True)
    parser.add_argument(
        "--tokenizer_kind", default="kmeans", help="kmeans, rqvae, or an index file to measure"
    )
    parser.add_argument("--levels", default="4", help="tokens an item")
    parser.add_argument("--codes", default="256", help="codes a level")
    parser.add_argument(
        "--embeddings", default="text", help="text, retriever, or a sentence-transformers folder"
    )
    parser.add_argument("--output", type=Path, required=True, help="the index file")
    known, rest = parser.parse_known_args(arguments)
    keys = {"semantic_ids": known.tokenizer_kind, "sid_levels": known.levels, "sid_codes": known.codes}
    keys |= {"sid_embeddings": known.embeddings, "stages": []}
    config = Config("DGR2", known.dataset, None, keys, rest)
    run_command(config, known.output, Console())


if __name__ == "__main__":
    sys.exit(main())
