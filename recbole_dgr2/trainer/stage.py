"""What a training stage is: it says how a batch becomes weighted loss terms, `fit` does the rest."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from recbole_dgr2.data.examples import collate
from recbole_dgr2.model.adapters import Adapted, weights_digest
from recbole_dgr2.model.backbone import Backbone
from recbole_dgr2.model.block_diffusion import BlockDiffusionSpec
from recbole_dgr2.model.checkpoint import StageInfo, read_info, restore_stage, save_stage
from recbole_dgr2.model.forward import TokenScorer
from recbole_dgr2.system import processes
from recbole_dgr2.trainer.loop import Loop
from recbole_dgr2.trainer.options import StageOptions
from recbole_dgr2.trainer.state import (
    PartialStore,
    Progress,
    changed_parts,
    fingerprint_of,
    fingerprint_weights,
)

logger = logging.getLogger(__name__)


class Keyed(Protocol):
    """An example of any stage: `key` keys its random numbers, and its `repr` is its content."""

    @property
    def key(self) -> int: ...


class Prepared(Protocol):
    """A batch ready for its forward pass; `weights`: denominators of its terms and metrics, by name."""

    @property
    def weights(self) -> Mapping[str, float]: ...

    def to(self, device: torch.device) -> Any: ...


P = TypeVar("P", bound=Prepared)


class Stage(ABC, Generic[P]):
    """A training stage.

    A stage names its loss terms in `coefficients`; the loss is `sum_terms coefficient * sum(w * value) /
    sum(w)`, with both sums over the whole batch of all processes. `prepare` gives the denominators without a
    forward pass, `score` the numerators. A name that is in `weights` but not in `coefficients` is a metric
    that is only logged. `reads_backbone`: `score` calls the backbone too, beside the model that it is given.

    Args:
        backbone: the starting weights; `fit` trains them in place.
        options: checked options.
        info_data: what later stages must be able to check (vocabulary fingerprint, N, prompt hash); saved
            with the stage.
    """

    name: ClassVar[str]
    parent: str | None = None
    parent_weights: str | None = None
    reads_backbone: bool = False
    loop: ClassVar[type[Loop]] = Loop
    coefficients: Mapping[str, float]

    def __init__(self, backbone: Backbone, options: StageOptions, info_data: Mapping[str, Any]) -> None:
        self.backbone = backbone
        self.options = options
        self.info_data = dict(info_data)
        self.scorer: nn.Module = TokenScorer(backbone.model)

    def follow(self, folder: Path) -> None:
        """Records the finished stage in `folder`, whose weights the backbone has, as the parent."""
        self.parent, self.parent_weights = folder.name, weights_digest(folder)

    @abstractmethod
    def prepare(self, batch: Any, generators: Sequence[torch.Generator]) -> P:
        """Lays a collated batch out, draws its noise, and weighs its slots; no forward pass.

        Args:
            batch: what `collate` returned, B rows.
            generators: one CPU generator a row, keyed by (seed, step, key).
        """

    @abstractmethod
    def score(self, model: nn.Module, prepared: P) -> dict[str, Tensor]:
        """Runs the model; returns the weighted sum of every term (differentiable) and metric of `prepared`, by name."""

    def parts(self, batch: Any, generators: Sequence[torch.Generator]) -> list[P]:
        """Prepares a batch as one or more forward passes, whose sums and weights add up to those of the batch."""
        return [self.prepare(batch, generators)]

    def collate(self, examples: Sequence[Any]) -> Any:
        """Pads examples to a batch."""
        return collate(examples, self.backbone.pad_id)

    def length(self, example: Any) -> int:
        """Returns the tokens that an example costs, by which batches are grouped."""
        return len(example.prompt_ids) + len(example.response_ids)

    def block_diffusion(self) -> BlockDiffusionSpec | None:
        """Returns the spec that is saved with the weights, None for an autoregressive stage."""
        return None

    def settings(self) -> dict[str, Any]:
        """Returns the stage's own options, beyond `StageOptions`, that decide what it computes."""
        return {}

    def loss(self, batch: Any, generators: Sequence[torch.Generator]) -> tuple[Tensor, dict[str, float]]:
        """Returns the loss of one batch alone (scalar, differentiable) and its terms and metrics as means."""
        sums: dict[str, Tensor] = {}
        weights: Counter[str] = Counter()
        for prepared in self.parts(batch, generators):
            weights.update(prepared.weights)
            for name, value in self.score(self.scorer, prepared.to(self.backbone.device)).items():
                sums[name] = sums[name] + value if name in sums else value
        means = {name: sums[name] / max(weights[name], 1e-30) for name in weights}
        total = torch.stack([means[name] * factor for name, factor in self.coefficients.items()]).sum()
        return total, {name: float(value.detach()) for name, value in means.items()}

    def fit(self, train: Sequence[Any], valid: Sequence[Any], folder: Path) -> Path:
        """Trains, or resumes, or reuses, and leaves the finished stage in `folder` and in `backbone`.

        An unfinished run keeps its state in `<folder>.partial`. A finished `folder` that was computed from
        the same options, examples and starting weights is loaded instead of trained again; any other is
        replaced, but only once its successor is whole.

        Args:
            train: training examples, at least one.
            valid: validation examples for early stopping; with none, the last weights are kept.
            folder: where the stage goes.

        Returns:
            `folder`.

        Raises:
            ValueError: no training examples.
            FloatingPointError: a loss or gradient is not finite.
            OSError: the disk is full or not writable; a finished folder is never left half written.
        """
        if not len(train):
            raise ValueError(f"stage {self.name}: no training examples, expected at least one")
        folder = Path(folder)
        fingerprint = self._fingerprint(train, valid)
        store = PartialStore(folder.with_name(f"{folder.name}.partial"), fingerprint)
        accelerator = processes.accelerator()
        processes.require_same(fingerprint, f"stage {self.name}")
        reused = self._reuse(folder, fingerprint)
        processes.require_same({"finished folder": reused}, f"stage {self.name}")
        if not reused:
            progress = self.loop(self, train, valid, store, accelerator).run()
            if processes.is_main():
                folder.parent.mkdir(parents=True, exist_ok=True)
                save_stage(folder, self.backbone, self._info(fingerprint, progress))
        processes.wait()
        if processes.is_main():
            store.remove()
        return folder

    def _fingerprint(self, train: Sequence[Any], valid: Sequence[Any]) -> dict[str, str]:
        adapter = [self.backbone.options] if isinstance(self.backbone, Adapted) else []
        return {
            "stage": self.name,
            "options": fingerprint_of([self.options.fingerprint_fields(), self.settings(), *adapter]),
            "data": fingerprint_of([sorted(self.info_data.items())]),
            "training examples": fingerprint_of(train),
            "validation examples": fingerprint_of(valid),
            "starting weights": fingerprint_weights(self.backbone.model),
            "parent": f"{self.parent} {self.parent_weights}",
        }

    def _info(self, fingerprint: Mapping[str, str], progress: Progress) -> StageInfo:
        record = {
            "fingerprint": dict(fingerprint),
            "history": progress.history,
            "best_epoch": progress.best_epoch,
        }
        return StageInfo(
            stage=self.name,
            parent=self.parent,
            block_diffusion=self.block_diffusion(),
            data={**self.info_data, "training": record},
            seed=self.options.seed,
            parent_weights=self.parent_weights,
        )

    def _reuse(self, folder: Path, fingerprint: Mapping[str, str]) -> bool:
        """Loads a finished stage of the same fingerprint; False where it has to be trained."""
        if not folder.exists():
            return False
        try:
            changed = changed_parts(read_info(folder).data["training"]["fingerprint"], fingerprint)
            if not changed:
                restore_stage(folder, self.backbone)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("stage %s: %s cannot be reused (%s), trained anew", self.name, folder, error)
            return False
        if changed:
            logger.info("stage %s: %s changed since %s, trained anew", self.name, ", ".join(changed), folder)
            return False
        logger.info("stage %s: %s is finished and up to date, reused", self.name, folder)
        return True
