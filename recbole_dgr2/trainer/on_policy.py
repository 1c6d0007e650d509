"""Stages that make their training examples anew every epoch (here called an iteration), from the weights of that
moment: the student's own rollouts.

An iteration begins by collecting: prompts are rolled out with the present weights, and what is to be learnt of the
rollouts is kept in the partial folder, as JSON, before the first optimizer step. So a run that is killed at any moment
goes on with the same rollouts, and ends with the weights of an unbroken run.
"""

from __future__ import annotations

import json
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from accelerate import Accelerator

from recbole_dgr2.system import processes
from recbole_dgr2.trainer.loop import Loop
from recbole_dgr2.trainer.stage import Keyed, Prepared, Stage
from recbole_dgr2.trainer.state import BEFORE, PartialStore, Resumed

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=Prepared)


@dataclass(frozen=True)
class Material:
    """What one iteration learns from: frozen dataclasses of numbers, strings and tuples of these; and its figures."""

    examples: Sequence[Any]
    metrics: Mapping[str, float]

    def to_json(self) -> str:
        """Text that `OnPolicy.read` reads back bit for bit; ValueError for a metric that is not finite."""
        wrong = sorted(name for name, value in self.metrics.items() if not math.isfinite(value))
        if wrong:
            raise ValueError(f"rollouts: {', '.join(wrong)} not finite, expected numbers")
        examples = [asdict(example) for example in self.examples]
        return json.dumps({"examples": examples, "metrics": dict(self.metrics)}, allow_nan=False)


class OnPolicyLoop(Loop):
    """The loop of `loop`, with examples collected at the beginning of every epoch.

    The starting weights are validated first: they are good already, and stand unless an iteration improves on them.
    All processes collect and validate together: each decodes its share of the prompts, and all get the whole.

    Args:
        stage: an `OnPolicy` stage.
        train: prompts to roll out.
        valid: prompts to validate on, may be empty.
        store, accelerator: see `Loop`.
    """

    def __init__(
        self,
        stage: OnPolicy[Any],
        train: Sequence[Keyed],
        valid: Sequence[Keyed],
        store: PartialStore,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(stage, [], [], store, accelerator)
        self.stage: OnPolicy[Any] = stage
        self.prompts, self.valid = train, valid
        self.kept: str | None = None  # of the iteration that a killed run was in
        steps = -(-stage.per_iteration(len(train)) // self.options.train_batch_size)
        self.total_steps = self.options.epochs * steps

    def _resume(self) -> Resumed | None:
        resumed = super()._resume()
        self.kept = resumed.material if resumed else None
        return resumed

    def _start(self) -> None:
        options, progress = self.options, self.progress
        if progress.saves or not (options.epochs and options.eval_step and len(self.valid)):
            return
        record = {"epoch": float(BEFORE)}
        self._validate(record)
        progress.best_epoch = BEFORE
        progress.history.append(record)
        self._save(best=True)

    def _restore_best(self) -> None:
        super()._restore_best()
        if self.progress.best_epoch == BEFORE:
            logger.warning(
                "%s: no iteration improved on the starting weights, which are kept", self.stage.name
            )

    def _begin_epoch(self) -> dict[str, float]:
        text, self.kept = self.kept, None
        if text is None:
            text = self._collect()
        material = self.stage.read(text)
        self.train = material.examples
        self.lengths = np.array([self.stage.length(example) for example in self.train])
        place = (self.stage.name, self.progress.epoch)
        if not self.train:
            logger.warning("%s iteration %d: the rollouts teach nothing, no step is taken", *place)
        shown = ", ".join(f"{name}: {value:.4g}" for name, value in material.metrics.items())
        logger.info("%s iteration %d: %d examples [%s]", *place, len(self.train), shown)
        return {f"rollout_{name}": value for name, value in material.metrics.items()}

    def _collect(self) -> str:
        """Collects, and keeps the result beside a saved state."""
        with self._autocast(), self.placement.decoding():
            text = self.stage.collect(self.prompts, self.progress.epoch).to_json()
        if not self.progress.saves:
            self._save()

        def keep() -> str:
            self.store.keep(text, self.progress)
            return text

        return processes.from_main(keep)

    def _evaluate(self) -> dict[str, float]:
        with self._autocast(), self.placement.decoding():
            metrics = dict(self.stage.assess(self.valid))
        return processes.gather(metrics)[0]


class OnPolicy(Stage[P]):
    """A stage that learns from its own rollouts. `fit` is given prompts; an epoch is an iteration."""

    loop: ClassVar[type[Loop]] = OnPolicyLoop

    @abstractmethod
    def collect(self, prompts: Sequence[Any], iteration: int) -> Material:
        """Rolls prompts out with the present weights and keeps what is to be learnt.

        Every process calls it, and shares what is costly out (`processes.spread`). It must depend on the weights, the
        seed, the prompts and the iteration alone.
        """

    @abstractmethod
    def example(self, values: Mapping[str, Any]) -> Any:
        """An example from what `dataclasses.asdict` gave of it, tuples as lists."""

    @abstractmethod
    def per_iteration(self, prompts: int) -> int:
        """Most examples that `collect` makes of that many prompts: what the learning rate's schedule counts on."""

    @abstractmethod
    def assess(self, prompts: Sequence[Any]) -> Mapping[str, float]:
        """Metrics of the present weights on validation prompts, among them `loss`, which is to be small."""

    def read(self, text: str) -> Material:
        """What was kept of an iteration."""
        values = json.loads(text)
        return Material([self.example(each) for each in values["examples"]], values["metrics"])
