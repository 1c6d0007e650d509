"""Each shim mends what it says, and checkpoints are read without running code from them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recbole.config import Config as RecBoleConfig
from recbole.data import create_dataset, data_preparation
from recbole.evaluator import Collector
from recbole.utils import get_trainer, init_seed
from scipy.sparse import dok_matrix

from recbole_dgr2 import compat
from recbole_dgr2.config import Config, retriever_class, retriever_config
from recbole_dgr2.safe_load import SavedConfig, SavedObject, safe_torch_load


def train(config: Config, **changes: Any) -> tuple[Any, Any, Any]:
    """Train the retriever of a config through RecBole; its trainer, test data and config."""
    host = retriever_config(config, **changes)
    init_seed(host["seed"], True)
    dataset = create_dataset(host)
    train_data, valid_data, test_data = data_preparation(host, dataset)
    model = retriever_class(config["retriever"])(host, train_data.dataset).to(host["device"])
    trainer = get_trainer(host["MODEL_TYPE"], host["model"])(host, model)
    trainer.fit(train_data, valid_data, saved=True, show_progress=False, verbose=False)
    return trainer, test_data, host


def test_importing_the_plugin_needs_no_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; import recbole_dgr2, recbole_dgr2.config, recbole_dgr2.utils;"
        "import recbole_dgr2.model.retriever; assert 'recbole.quick_start' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)


def test_numpy_aliases() -> None:
    RecBoleConfig.compatibility_settings(types.SimpleNamespace())
    assert np.dtype(np.__dict__["float_"]) == np.float64
    assert np.__dict__["unicode_"] is np.str_


def test_dok_update() -> None:
    matrix = dok_matrix((2, 3), dtype=np.float32)
    matrix._update({(0, 1): 1.0, (1, 2): 2.0})
    assert matrix.toarray().tolist() == [[0, 1, 0], [0, 0, 2]]


def test_general_recommenders_import_without_kmeans_pytorch() -> None:
    assert retriever_class("LDiffRec").__name__ == "LDiffRec"
    if getattr(sys.modules["kmeans_pytorch"], "__file__", None) is None:
        with pytest.raises(ImportError, match="pip install kmeans_pytorch"):
            sys.modules["kmeans_pytorch"].kmeans()


def test_anomaly_detection_stays_off() -> None:
    assert retriever_class("SASRec").__name__ == "SASRec"
    assert "recbole.model.sequential_recommender.sine" in sys.modules
    assert not torch.is_anomaly_enabled()


def test_apply_again_changes_nothing() -> None:
    before = Collector.get_data_struct
    compat.apply()
    assert Collector.get_data_struct is before


def test_collector_keeps_counts(toy_config: Callable[..., Config]) -> None:
    trainer, test_data, _ = train(toy_config(metrics=["ItemCoverage", "AveragePopularity", "NDCG"]))
    for _ in range(2):  # the counts must survive the first call
        result = trainer.evaluate(test_data, load_best_model=False)
        assert 0 < result["itemcoverage@10"] <= 1
    struct = trainer.eval_collector.data_struct
    assert struct["data.num_items"] == 81
    assert isinstance(struct["data.count_items"], Counter)


@pytest.mark.parametrize("retriever", ["ItemKNN", "BPR", "LightGCN", "SASRec", "EASE", "SASRecF"])
def test_best_model_is_reloaded(toy_config: Callable[..., Config], retriever: str) -> None:
    features: dict[str, Any] = {}
    if retriever == "SASRecF":  # its checkpoint holds a layer, and through it the whole dataset
        columns = {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id", "brand"]}
        features = {"load_col": columns, "selected_features": ["brand"]}
    config = toy_config(retriever=retriever, epochs=2, **features)
    trainer, test_data, _ = train(config)
    kept = trainer.evaluate(test_data, load_best_model=False) if retriever == "ItemKNN" else None
    loaded = trainer.evaluate(test_data, load_best_model=True)
    assert kept is None or kept == loaded
    saved = safe_torch_load(trainer.saved_model_file)
    assert isinstance(saved["config"], SavedConfig)
    assert saved["config"]["model"] == retriever
    assert saved["config"]["typo"] is None
    assert "seed" in saved["config"]


def test_training_resumes(toy_config: Callable[..., Config]) -> None:
    trainer, _, host = train(toy_config(retriever="BPR"))
    again = get_trainer(host["MODEL_TYPE"], host["model"])(host, trainer.model)
    again.resume_checkpoint(trainer.saved_model_file)
    assert again.start_epoch == 1


def test_checkpoint_is_plain_recbole(toy_config: Callable[..., Config]) -> None:
    """Read with RecBole's own classes it holds RecBole's own Config, so it works without the plugin."""
    trainer, _, _ = train(toy_config(retriever="BPR"))
    saved = torch.load(trainer.saved_model_file, weights_only=False)
    assert type(saved["config"]) is RecBoleConfig


def save_checkpoint(path: Path, content: Any) -> Path:
    torch.save(content, path, pickle_protocol=4)
    return path


class Runs:
    """Pickles into a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda mark: Runs(Path.touch, mark), "refers to"),
        (lambda mark: Runs(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        (lambda mark: Runs(subprocess.call, ["touch", str(mark)]), "subprocess.call"),
    ],
)
def test_no_code_runs(tmp_path: Path, call: Callable[[Path], Any], named: str) -> None:
    mark = tmp_path / "ran"
    path = save_checkpoint(tmp_path / "bad.pth", {"state_dict": {}, "config": call(mark)})
    with pytest.raises(ValueError, match="refused") as caught:
        safe_torch_load(path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_constructors_do_not_run(tmp_path: Path) -> None:
    """RecBole's Config evaluates strings, and a model's constructor may load another file."""
    mark = tmp_path / "ran"
    calls = [
        Runs(RecBoleConfig, "BPR", "toy", None, {"a": f"open({str(mark)!r}, 'w')"}),
        Runs(retriever_class("BPR"), {}, None),
    ]
    config, model = safe_torch_load(save_checkpoint(tmp_path / "odd.pth", calls))
    assert config["a"] is None
    assert isinstance(model, SavedObject)
    assert not mark.exists()


def test_dotted_names_are_refused(tmp_path: Path) -> None:
    """Protocol 4 can ask for an attribute of an allowed module; only exact names are on the list."""
    stream = b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93."
    with pytest.raises(pickle.UnpicklingError, match=r"torch\.serialization\.os"):
        from recbole_dgr2.safe_load import _unpickle

        (tmp_path / "x").write_bytes(stream)
        with (tmp_path / "x").open("rb") as file:
            _unpickle(file)


def test_checkpoint_of_another_device(tmp_path: Path) -> None:
    """A file that says cuda loads where there is none (RecBole #924)."""
    saved = {"device": torch.device("cuda", 0), "weight": torch.arange(3.0), "model": retriever_class("BPR")}
    loaded = safe_torch_load(save_checkpoint(tmp_path / "a.pth", saved))
    assert loaded["device"].type == "cuda"
    assert loaded["weight"].device.type == "cpu"
    assert issubclass(loaded["model"], SavedObject)
    assert loaded["model"].__name__ == "BPR"


def test_values_survive(tmp_path: Path) -> None:
    values = {
        "array": np.arange(4, dtype=np.float32),
        "number": np.float64(0.5),
        "sparse": dok_matrix((2, 2)).tocsr(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "half": torch.ones(2, dtype=torch.float16),
        "dtype": torch.bfloat16,
        "set": {1, 2},
    }
    loaded = safe_torch_load(save_checkpoint(tmp_path / "v.pth", values))
    assert loaded["array"].tolist() == [0, 1, 2, 3]
    assert loaded["number"] == 0.5
    assert loaded["sparse"].shape == (2, 2)
    assert loaded["half"].dtype == torch.float16
    assert loaded["dtype"] is torch.bfloat16
    assert loaded["set"] == {1, 2}


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        safe_torch_load(tmp_path / "absent.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match="not a RecBole checkpoint"):
        safe_torch_load(tmp_path / "text.pth")
    with (tmp_path / "old.pth").open("wb") as file:
        pickle.dump({"state_dict": {}}, file)
    with pytest.raises(ValueError, match="not a RecBole checkpoint"):
        safe_torch_load(tmp_path / "old.pth")
    whole = save_checkpoint(tmp_path / "whole.pth", {"a": torch.ones(1000)}).read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.pth"):
        safe_torch_load(tmp_path / "cut.pth")
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "script.pth"))
    with pytest.raises(ValueError, match="TorchScript"):
        safe_torch_load(tmp_path / "script.pth")
