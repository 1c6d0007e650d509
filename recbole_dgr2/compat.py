"""All compatibility code: what RecBole 1.2.0 and 1.2.1 need to run on current releases of its dependencies.

Each shim names the upstream bug, the versions it is for, and has a test. `recbole.quick_start` is never
imported: it is the only module that needs ray, which has no matching release for Python 3.12 and later
(RecBole #1518, #2105).
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from recbole_dgr2.safe_load import safe_torch_load

_applied = False


def apply() -> None:
    """Mend RecBole's dependencies, then RecBole; once per process, before anything else imports recbole."""
    global _applied
    if _applied:
        return
    _restore_numpy_aliases()
    _restore_dok_update()
    _stand_in_for_kmeans_pytorch()
    _guard_collector()
    _load_checkpoints_safely()
    _hush_recbole()
    _undo_anomaly_detection()
    _applied = True


def _restore_numpy_aliases() -> None:
    """numpy >= 2.0 dropped the names that RecBole's Config.compatibility_settings assigns from.

    RecBole <= 1.2.1, config/configurator.py:625-635 (RecBole #1604, #1714, #2203).
    """
    import numpy as np

    for old, new in (("float_", "float64"), ("complex_", "complex128"), ("unicode_", "str_")):
        if old not in np.__dict__:
            setattr(np, old, getattr(np, new))


def _restore_dok_update() -> None:
    """scipy >= 1.13 dropped `dok_matrix._update`, with which RecBole's graph models fill their adjacency.

    RecBole <= 1.2.1, LightGCN, NGCF, GCMC, NCL, SpectralCF, KGIN, MCCLK (RecBole #2034, #2090, #2185).
    """
    from scipy.sparse import dok_matrix

    if hasattr(dok_matrix, "_update"):
        return

    def _update(self: Any, data: Mapping[tuple[int, int], float]) -> None:
        self._dict.update(data)

    dok_matrix._update = _update


def _stand_in_for_kmeans_pytorch() -> None:
    """Every general recommender needs `kmeans_pytorch`, an undeclared dependency of LDiffRec alone.

    RecBole 1.2.0, model/general_recommender/ldiffrec.py:29 (RecBole #1518, #2105). Where the package is absent a
    module takes its place whose `kmeans` says what to install.
    """
    if "kmeans_pytorch" in sys.modules or find_spec("kmeans_pytorch") is not None:
        return

    def kmeans(*args: Any, **options: Any) -> None:
        raise ImportError("LDiffRec with n_cate > 1 needs another package: pip install kmeans_pytorch")

    module = types.ModuleType("kmeans_pytorch")
    module.__dict__["kmeans"] = kmeans
    sys.modules["kmeans_pytorch"] = module


def _guard_collector() -> None:
    """`Collector.get_data_struct` calls `.cpu()` on counts, which are plain ints and Counters.

    RecBole 1.2.1 only, evaluator/collector.py:226: ItemCoverage, AveragePopularity, ShannonEntropy, GiniIndex
    and TailPercentage crash (RecBole #2131, #2191, #2194). The counts are hidden from that one loop.
    """
    import torch
    from recbole.evaluator.collector import Collector

    original = Collector.get_data_struct

    def get_data_struct(self: Any) -> Any:
        data = self.data_struct._data_dict
        counts = {key: value for key, value in data.items() if not isinstance(value, torch.Tensor)}
        for key in counts:
            del data[key]
        struct = original(self)
        data.update(counts)
        struct._data_dict.update(counts)
        return struct

    Collector.get_data_struct = get_data_struct


class _TorchWithSafeLoad(types.ModuleType):
    """The torch module as RecBole's trainer sees it: the same in all but `load`."""

    load = staticmethod(safe_torch_load)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def _load_checkpoints_safely() -> None:
    """torch >= 2.6 refuses RecBole's checkpoints, which pickle the Config; allow-listing it cannot help.

    RecBole <= 1.2.1, trainer/trainer.py:323 (resume_checkpoint) and :583 (evaluate); RecBole #2212, and #924
    for checkpoints of another device. Both calls go through the module's name `torch`: it is replaced there.
    """
    import recbole.trainer.trainer as trainer

    trainer.torch = _TorchWithSafeLoad("torch")


def _hush_recbole() -> None:
    """RecBole's code makes pandas and torch warn, several times a run, of what no user of it can change.

    RecBole <= 1.2.1: chained assignment in data/dataset/dataset.py:648 and :650, torch.cuda.amp in
    trainer/trainer.py:235. The package requires releases in which both still work.
    """
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"recbole(\.|$)")


def _undo_anomaly_detection() -> None:
    """Importing any sequential recommender turns torch's anomaly detection on for the whole process.

    RecBole <= 1.2.1, model/sequential_recommender/sine.py:25: every later training, the language model's too, runs
    slower and fails on the first NaN with a long traceback. The module is imported here, and the setting put back.
    """
    import torch

    before = torch.is_anomaly_enabled()
    import recbole.model.sequential_recommender.sine  # noqa: F401

    torch.autograd.set_detect_anomaly(before)
