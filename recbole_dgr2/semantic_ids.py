"""Semantic IDs of a data set: made, measured, and written to an index file.

python -m recbole_dgr2.semantic_ids --dataset=Amazon_Beauty --tokenizer_kind=rqvae --output=saved/beauty.sid.json

Prints a table of figures and writes them beside the index file, as `<name>.figures.json`. Other options of a run
(--data_path=..., --retriever=BPR --embeddings=retriever) are --key=value words; --tokenizer_kind also takes the path of
an index file, to measure what somebody else has made. `semantic_ids=<file>` makes a run use an index file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from recbole_dgr2.config import Config
from recbole_dgr2.data.semantic_id import write_index
from recbole_dgr2.data.sid_quality import SidQuality, sid_quality
from recbole_dgr2.pipeline import views
from recbole_dgr2.pipeline.preparation import Data, load_data
from recbole_dgr2.pipeline.retrieval import RetrieverStore
from recbole_dgr2.pipeline.semantic_ids import MadeIds, embedder_of, make_semantic_ids
from recbole_dgr2.system.cache import Cache, data_fingerprint, write_text
from recbole_dgr2.system.command import Arguments, command, command_parser
from recbole_dgr2.utils import item_tokens


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
