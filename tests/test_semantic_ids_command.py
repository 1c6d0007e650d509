"""The command that makes semantic IDs, and their way into a run: cached, written, refused where they do not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recbole_dgr2.config import Config
from recbole_dgr2.data.quantized import CodeOptions, Quantized
from recbole_dgr2.data.rqvae import RQVAEOptions, rqvae
from recbole_dgr2.data.semantic_id import read_index
from recbole_dgr2.pipeline import semantic_ids, views
from recbole_dgr2.pipeline.preparation import Data, load_data
from recbole_dgr2.semantic_ids import main
from recbole_dgr2.system.cache import Cache
from recbole_dgr2.utils import item_tokens
from tests.toy_run import ROOT

TOY = (
    "--dataset=toy",
    f"--data_path={ROOT / 'dataset'}",
    "--codes=8",
    "--levels=3",
    "--use_gpu=False",
    "--show_progress=False",
    "--epochs=1",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An RQ-VAE of a few epochs, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def short(vectors: np.ndarray, options: CodeOptions) -> Quantized:
        return rqvae(vectors, options, RQVAEOptions(latent=4, hidden=16, epochs=5))

    monkeypatch.setitem(semantic_ids.QUANTIZERS, "rqvae", short)


def run(*words: str, output: str = "out/toy.json") -> int:
    return main([*TOY, f"--output={output}", *words])


@pytest.mark.parametrize("kind", ["kmeans", "rqvae"])
def test_index_and_figures_are_written(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--tokenizer_kind={kind}", "--seed=3") == 0
    entries = json.loads(Path("out/toy.json").read_text())
    assert sorted(entries) == sorted(f"i{number}" for number in range(1, 81))
    assert len({tuple(tokens) for tokens in entries.values()}) == 80
    content = json.loads(Path("out/toy.figures.json").read_text())
    assert content["options"] == {
        "source": kind,
        "levels": 3,
        "codes": 8,
        "embeddings": "text",
        "seed": 3,
        "progress": False,
    }
    figures = content["figures"]
    assert figures["unique"] == 1.0 and len(figures["levels"]) == 3
    assert figures["levels"][0]["neighbours"] > figures["levels"][0]["random_pairs"]
    shown = capsys.readouterr().out
    assert f"toy, {kind}, text" in shown and "100.00%" in shown


def test_items_of_a_category_share_prefixes() -> None:
    assert run() == 0
    figures = json.loads(Path("out/toy.figures.json").read_text())["figures"]
    assert figures["levels"][0]["category"] > 0.9


def test_the_same_again_comes_from_the_cache_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(output="one.json") == 0
    monkeypatch.setitem(semantic_ids.QUANTIZERS, "kmeans", None)  # type: ignore[arg-type]
    assert run(output="two.json") == 0
    assert Path("one.json").read_text() == Path("two.json").read_text()
    with pytest.raises(TypeError):
        run("--seed=1")  # another seed is another entry


def test_without_a_cache_the_same_seed_gives_the_same() -> None:
    for output in ("one.json", "two.json"):
        assert run("--tokenizer_kind=rqvae", "--cache_dir=null", output=output) == 0
    assert Path("one.json").read_text() == Path("two.json").read_text()


def test_the_embeddings_of_a_retriever() -> None:
    assert run("--embeddings=retriever", "--retriever=BPR", "--embedding_size=8") == 0
    assert json.loads(Path("out/toy.figures.json").read_text())["options"]["embeddings"] == "retriever"


def test_an_index_file_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(output="own.json") == 0
    assert run("--tokenizer_kind=own.json") == 0
    assert json.loads(Path("own.json").read_text()) == json.loads(Path("out/toy.json").read_text())
    figures = json.loads(Path("out/toy.figures.json").read_text())["figures"]
    assert figures["collisions"] == figures["moved"] == 0
    assert "own.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer_kind=kmean"], "'kmean' is neither kmeans nor rqvae nor an index file; did you mean"),
        (["--tokenizer_kind=missing.json"], "no file missing.json"),
        (["--embeddings=texts"], "no folder texts, expected text, retriever, .*; did you mean 'text'"),
        (["--embeddings=retriever"], "ItemKNN: has no item embeddings"),
        (["--embeddings=retriever", "--candidate_file=x.csv"], "the candidates come from candidate_file"),
        (["--levels=0"], r"sid_levels \(config_dict\): expected int in \[1, 8\]"),
        (["--codes=many"], r"sid_codes \(config_dict\): expected int"),
        (["--title_fields=x"], "the nearest known key is 'title_field'"),
        (["--title_field=null", "--category_field=null", "--brand_field=null"], "no item has text"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and shown[0].startswith("error: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(shown[0])
    assert not Path("out").exists()


Loaded = Callable[..., tuple[Config, Data]]


@pytest.fixture
def loaded(toy_config: Callable[..., Config]) -> Loaded:
    def load(**keys: Any) -> tuple[Config, Data]:
        config = toy_config(sid_levels=3, sid_codes=8, **keys)
        folder = views.run_options(config).data_folder
        return config, load_data(config, folder, views.prompt_options(config))

    return load


class NoHost:
    store = None


def test_a_run_gets_and_keeps_its_semantic_ids(loaded: Loaded, tmp_path: Path) -> None:
    config, data = loaded(semantic_ids="kmeans")
    made = semantic_ids.add_semantic_ids(config, data, (NoHost(), Cache(None)), tmp_path)  # type: ignore[arg-type]
    assert made.sids is not None and made.item_text.sids == made.sids.texts()
    again = semantic_ids.read_semantic_ids(config, data, tmp_path)
    assert again.sids is not None and again.sids.digest == made.sids.digest
    written = read_index(tmp_path / "semantic_ids.json", item_tokens(data.dataset))
    assert written.digest == made.sids.digest


def test_a_run_without_semantic_ids_is_as_before(loaded: Loaded, tmp_path: Path) -> None:
    config, data = loaded()
    assert semantic_ids.add_semantic_ids(config, data, (NoHost(), Cache(None)), tmp_path) is data  # type: ignore[arg-type]
    assert semantic_ids.read_semantic_ids(config, data, tmp_path) is data
    assert not (tmp_path / "semantic_ids.json").exists()


def test_a_bad_source_is_known_before_anything_is_trained(loaded: Loaded) -> None:
    for keys, message in (
        ({"semantic_ids": "kmeens"}, "did you mean 'kmeans'"),
        ({"semantic_ids": "no.json"}, "no file no.json"),
        ({"semantic_ids": "rqvae", "sid_embeddings": "retrievers"}, "did you mean 'retriever'"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            semantic_ids.check_semantic_ids(*loaded(**keys))
    semantic_ids.check_semantic_ids(*loaded(semantic_ids="kmeans", sid_embeddings="retriever"))
    semantic_ids.check_semantic_ids(*loaded())


def test_a_damaged_cache_entry_is_built_again(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, data = loaded(semantic_ids="kmeans")
    cache = Cache(tmp_path / "kept")

    def digest() -> str:
        made = semantic_ids.add_semantic_ids(config, data, (NoHost(), cache), tmp_path)  # type: ignore[arg-type]
        assert made.sids is not None
        return made.sids.digest

    first = digest()
    (entry,) = (tmp_path / "kept").glob("semantic-ids-*.parquet")
    entry.write_bytes(entry.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert digest() == first
    assert "is damaged" in caplog.text
