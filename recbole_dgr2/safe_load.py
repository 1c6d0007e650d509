"""Load a RecBole checkpoint without running code from it.

RecBole pickles its whole Config into every checkpoint, so `torch.load(weights_only=True)` refuses the file
and `weights_only=False` would run whatever it contains. Here an unpickler with an allow-list reads it:
tensors, arrays and containers are rebuilt, RecBole's classes become inert stand-ins, the rest is refused.
"""

from __future__ import annotations

import importlib
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

# Callables that only build a value out of values. No entry may import, open, evaluate or look up by name.
_ALLOWED: dict[str, tuple[str, ...]] = {
    "builtins": (
        "set",
        "frozenset",
        "dict",
        "list",
        "tuple",
        "int",
        "float",
        "complex",
        "bool",
        "bytearray",
        "slice",
    ),
    "collections": ("OrderedDict", "Counter", "defaultdict", "deque"),
    "_codecs": ("encode",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),  # Python 3.13
    "torch": ("device", "Size"),
    "torch._utils": (
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_sparse_tensor",
        "_rebuild_device_tensor_from_numpy",
    ),
    "torch.serialization": ("_get_layout",),
    "torch.nn.parameter": ("Parameter",),
    "numpy": ("ndarray", "dtype", "matrix"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "recbole.utils.enum_type": (
        "ModelType",
        "EvaluatorType",
        "InputType",
        "FeatureType",
        "FeatureSource",
        "KGDataLoaderState",
    ),
}
_SPARSE = ("csr", "csc", "coo", "dok", "lil", "bsr", "dia")
for _kind in _SPARSE:  # scipy moved these modules behind an underscore in 1.8
    _ALLOWED[f"scipy.sparse._{_kind}"] = _ALLOWED[f"scipy.sparse.{_kind}"] = (
        f"{_kind}_matrix",
        f"{_kind}_array",
    )


# Of these packages a checkpoint may hold objects that need not come back: the model's class, and in feature models
# (FDSA, SASRecF, GRU4RecF, DIN, DIEN) a layer with the whole dataset, its tables and its logger.
_STAND_IN = ("recbole.", "recbole_dgr2.", "torch.nn.modules.", "pandas.", "logging.", "yaml.")


class SavedObject:
    """Stands in for a class that a checkpoint names: keeps what was saved in it, does nothing.

    Whatever the file asks the class to be called with is dropped, so no constructor of RecBole or pandas runs.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> SavedObject:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: RecBole's own Config, for one, evaluates strings here."""


class SavedConfig(SavedObject):
    """What a checkpoint says about the run that wrote it; reads like RecBole's Config."""

    final_config_dict: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self.final_config_dict.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self.final_config_dict


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("recbole.config.configurator", "Config"), ("recbole_dgr2.config", "Config")}:
            return SavedConfig
        if name in _ALLOWED.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "numpy.dtypes" and name.isidentifier() and name.endswith("DType"):
            return getattr(importlib.import_module(module), name)
        if f"{module}.".startswith(_STAND_IN):
            return type(name, (SavedObject,), {"__module__": module})
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no RecBole checkpoint needs")


def _unpickle(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


# what torch.load asks of a pickle module
_PICKLE = types.SimpleNamespace(__name__="recbole_dgr2.safe_load", Unpickler=_Unpickler, load=_unpickle)


def safe_torch_load(path: str | Path, map_location: Any = "cpu") -> Any:
    """Read a RecBole checkpoint (or any file of plain tensors) from any device, running no code from it.

    Args:
        path: a file written by RecBole's Trainer.
        map_location: as in `torch.load`; the default reads a CUDA checkpoint on a machine without CUDA.
    Returns:
        The saved object; its "config" is a SavedConfig.
    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a checkpoint, damaged, or it holds something that is not on the allow-list.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a RecBole checkpoint (expected a .pth file written by torch.save)")
    with zipfile.ZipFile(path) as archive:
        if any(entry.endswith("/constants.pkl") for entry in archive.namelist()):
            raise ValueError(f"{path}: a TorchScript program, not a RecBole checkpoint")
    try:
        loaded = torch.load(path, map_location=map_location, pickle_module=_PICKLE, weights_only=False)
    except (pickle.UnpicklingError, TypeError, AttributeError, EOFError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: refused to load this checkpoint: {reason}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("other_parameter"), dict):
        # A layer saved here is also in state_dict, and the model at hand has built its own.
        kept = {k: v for k, v in loaded["other_parameter"].items() if not isinstance(v, SavedObject)}
        loaded["other_parameter"] = kept
    return loaded
