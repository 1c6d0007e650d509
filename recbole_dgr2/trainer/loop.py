"""The one training loop under every stage: epochs, accumulation, validation, early stopping, logging, resuming.

A step is a pure function of the weights, the optimizer and (seed, step, examples), on one process or many:
losses are normalised by the sums of weights over the whole batch, so neither the micro-batch size nor the
number of processes changes the gradient.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from recbole_dgr2.model.forward import recomputed
from recbole_dgr2.system import processes
from recbole_dgr2.trainer.batches import (
    VALIDATION_STEP,
    epoch_batches,
    generators,
    process_share,
    sorted_batches,
)
from recbole_dgr2.trainer.optimizers import build_optimizers
from recbole_dgr2.trainer.options import learning_rate_at
from recbole_dgr2.trainer.placement import gathered, no_dropout, place, placed_as, whole
from recbole_dgr2.trainer.state import PartialStore, Progress, Resumed, moment

if TYPE_CHECKING:
    from recbole_dgr2.trainer.stage import Keyed, Stage

logger = logging.getLogger(__name__)

CPU_MICRO_BATCH = 8


class Loop:
    """Trains one stage in place.

    Args:
        stage: what to compute; its scorer is trained.
        train: training examples, at least one.
        valid: validation examples, may be empty.
        store: where the resumable state is kept.
        accelerator: device and processes.
    """

    def __init__(
        self,
        stage: Stage[Any],
        train: Sequence[Keyed],
        valid: Sequence[Keyed],
        store: PartialStore,
        accelerator: Accelerator,
    ) -> None:
        self.stage, self.options = stage, stage.options
        self.train, self.valid = train, valid
        self.store, self.accelerator = store, accelerator
        self.lengths = np.array([stage.length(example) for example in train])
        self.valid_lengths = np.array([stage.length(example) for example in valid])
        self.placement = place(stage.scorer, accelerator, keep=stage.reads_backbone)
        self.model, scorer = self.placement.model, self.placement.scorer
        self.trainable = {name: p for name, p in scorer.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizers(scorer.modules(), self.options)
        self.optimizer.prepare(accelerator)
        self.progress = Progress()
        self.micro = self.options.micro_batch_size or (
            CPU_MICRO_BATCH if accelerator.device.type == "cpu" else 0
        )
        self.total_steps = self.options.epochs * -(-len(train) // self.options.train_batch_size)

    def run(self) -> Progress:
        """Trains to the end, from the stored state where there is one; leaves the best weights in the model.

        Raises:
            FloatingPointError: a loss or gradient is not finite; the last stored state is kept.
        """
        self._resume()
        self.model.train()
        no_dropout(self.model)
        try:
            with recomputed(self.placement.scorer.model, self.options.gradient_checkpointing):
                self._start()
                while self.progress.epoch < self.options.epochs and not self.progress.stopped:
                    self._epoch()
            self._restore_best()
            self.placement.finish()
        finally:
            self.placement.leave()
            self.stage.scorer.eval()
        return self.progress

    def _start(self) -> None:
        """What comes before the first epoch, after a resume too: nothing for a supervised stage."""

    def _begin_epoch(self) -> dict[str, float]:
        """Makes the examples of the present epoch, where they change; returns what is to be logged of that."""
        return {}

    def _resume(self) -> Resumed | None:
        resumed = self.store.load()
        saves = resumed.progress.saves if resumed else 0
        processes.require_same({"state to resume from": saves}, str(self.store.folder))
        if resumed is None:
            return None
        self.progress = resumed.progress
        self._set_weights(resumed.weights)
        self.optimizer.load_state_dict(resumed.optimizer)
        place = (self.stage.name, self.progress.epoch, self.progress.step, self.store.folder)
        logger.info("%s: resumed at epoch %d, step %d from %s", *place)
        return resumed

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(placed_as(weights[name], parameter))

    def _restore_best(self) -> None:
        best = self.store.best_weights(self.progress)
        if best is not None:
            self._set_weights(best)
            found = (self.stage.name, self.progress.best_loss, moment(self.progress.best_epoch))
            logger.info("%s: finished training, best valid loss %.4f (%s)", *found)

    def _save(self, best: bool = False) -> None:
        progress = self.progress
        weights, optimizer = gathered(self.trainable), gathered(self.optimizer.state_dict())

        def save() -> tuple[int, str | None]:
            self.store.save(progress, weights, optimizer, best)
            return progress.saves, progress.best_file

        progress.saves, progress.best_file = processes.from_main(save)

    def _epoch(self) -> None:
        progress, options = self.progress, self.options
        start = time.perf_counter() - progress.seconds
        begun = self._begin_epoch()
        batches = epoch_batches(self.lengths, options.train_batch_size, options.seed, progress.epoch)
        for batch in self._bar(batches, progress.batch, f"{self.stage.name} {progress.epoch:>3}"):
            self._step(batch)
            progress.batch, progress.step = progress.batch + 1, progress.step + 1
            progress.seconds = time.perf_counter() - start
            if options.save_step and progress.step % options.save_step == 0 and progress.batch < len(batches):
                self._save()
        train = self._metrics(progress.sums, progress.weights) if progress.weights else {}
        if train:  # else there was nothing to learn from
            took = f"time: {progress.seconds:.2f}s, train "
            logger.info("%s epoch %d training [%s%s]", self.stage.name, progress.epoch, took, _format(train))
        record = {"epoch": float(progress.epoch), **begun}
        record.update({f"train_{name}": value for name, value in train.items()})
        improved = self._due() and self._validate(record)
        progress.history.append(record)
        progress.epoch, progress.batch, progress.seconds = progress.epoch + 1, 0, 0.0
        progress.sums, progress.weights = {}, {}
        self._save(best=improved)

    def _bar(self, batches: Sequence[np.ndarray], done: int, text: str) -> Any:
        quiet = not (self.options.progress and processes.is_main())
        hidden = True if quiet else None  # None: shown on a terminal only
        return tqdm(batches[done:], desc=text, total=len(batches), initial=done, disable=hidden, leave=False)

    def _step(self, batch: np.ndarray) -> None:
        """One optimizer step on one batch of example indices."""
        prepared, totals = self._prepare(self.train, batch, self.progress.step)
        sums: Counter[str] = Counter()
        for index, (item, counted) in enumerate(prepared):
            with self._sync(last=index == len(prepared) - 1), self._autocast():
                parts = self.stage.score(self.model, item)
                # processes average their gradients, the loss is a sum over them
                loss = self._combine(parts, totals) * (self.accelerator.num_processes * counted)
                self.accelerator.backward(loss)
            sums.update({name: float(value.detach()) * counted for name, value in parts.items()})
        sums = Counter(self._reduce(sums))
        parameters = self.model.parameters()
        norm = float(whole(self.accelerator.clip_grad_norm_(parameters, self.options.clip_grad_norm)))
        self._check_finite(self._metrics(sums, totals)["loss"], norm, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.progress.step, self.total_steps, self.options)
        self.optimizer.step()
        self.optimizer.zero_grad()
        _add(self.progress.sums, sums)
        _add(self.progress.weights, totals)

    def _prepare(
        self, examples: Sequence[Keyed], batch: np.ndarray, step: int
    ) -> tuple[list[tuple[Any, bool]], dict[str, float]]:
        """This process's micro-batches, each with whether it counts, and the weights over all processes."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        prepared: list[tuple[Any, bool]] = []
        totals: Counter[str] = Counter()
        for share in process_share(batch, rank, world, self.micro):
            counted = len(share) > 0
            # a process without examples left still runs one, uncounted, since gradients are reduced together
            rows = [examples[index] for index in (share if counted else batch[:1])]
            random = generators(self.options.seed, step, [row.key for row in rows])
            for item in self.stage.parts(self.stage.collate(rows), random):
                totals.update(item.weights if counted else dict.fromkeys(item.weights, 0.0))
                prepared.append((item.to(self.accelerator.device), counted))
        if processes.sharded():  # as many passes as the others
            most = max(processes.gather(len(prepared)))
            prepared += [(prepared[-1][0], False)] * (most - len(prepared))
        return prepared, self._reduce(totals)

    def _combine(self, parts: Mapping[str, Tensor], totals: Mapping[str, float]) -> Tensor:
        """Returns `sum_terms coefficient * (weighted sum here) / (weights of the batch)`, of the terms in `parts`."""
        scales = {name: factor / max(totals[name], 1e-30) for name, factor in self.stage.coefficients.items()}
        terms = [parts[name] * scale for name, scale in scales.items() if name in parts]
        return torch.stack(terms).sum()

    def _metrics(self, sums: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
        """Returns the loss and every term and metric as a weighted mean (0 where nothing weighed)."""
        means = {name: sums[name] / weights[name] if weights[name] else 0.0 for name in weights}
        loss = sum(factor * means.get(name, 0.0) for name, factor in self.stage.coefficients.items())
        return {"loss": loss, **means}

    def _reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the sums over all processes; one may lack names that another has."""
        total: dict[str, float] = {}
        for part in processes.gather(dict(values)):
            _add(total, part)
        return total

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def _autocast(self) -> AbstractContextManager[Any]:
        kind, enabled = self.accelerator.device.type, self.options.mixed_precision == "bf16"
        # its cache would keep a copy of every weight that was gathered
        return torch.autocast(kind, torch.bfloat16, enabled, cache_enabled=not processes.sharded())

    def _check_finite(self, loss: float, norm: float, batch: np.ndarray) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        keys = [self.train[index].key for index in batch]
        shown = ", ".join(map(str, keys[:8])) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        raise self._not_finite(
            f", step {self.progress.step}: loss {loss}, gradient norm {norm}, samples {shown}"
        )

    def _not_finite(self, what: str) -> FloatingPointError:
        return FloatingPointError(
            f"stage {self.stage.name}, epoch {self.progress.epoch}{what}; the last state is kept in "
            f"{self.store.folder}; try a smaller learning_rate or clip_grad_norm"
        )

    def _due(self) -> bool:
        """Whether the present epoch ends with a validation."""
        past, step = self.progress.epoch + 1, self.options.eval_step
        return bool(step and len(self.valid) and (past % step == 0 or past == self.options.epochs))

    def _validate(self, record: dict[str, float]) -> bool:
        """Validates, adds the result to `record`, and returns whether the loss is the best so far."""
        progress, options = self.progress, self.options
        start = time.perf_counter()
        metrics = self._evaluate()
        if not math.isfinite(metrics["loss"]):
            raise self._not_finite(f": validation loss {metrics['loss']}")
        took = time.perf_counter() - start
        shown = (self.stage.name, moment(record["epoch"]), took, _format(metrics))
        logger.info("%s %s evaluating [time: %.2fs, valid %s]", *shown)
        record.update({f"valid_{name}": value for name, value in metrics.items()})
        improved = progress.best_loss is None or metrics["loss"] < progress.best_loss
        if improved:
            progress.best_loss, progress.best_epoch, progress.worse = metrics["loss"], progress.epoch, 0
        else:
            progress.worse += 1
            progress.stopped = progress.worse > options.stopping_step
        return improved

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        sums: Counter[str] = Counter()
        weights: Counter[str] = Counter()
        for batch in sorted_batches(self.valid_lengths, self.options.train_batch_size):
            prepared, totals = self._prepare(self.valid, batch, VALIDATION_STEP)
            weights.update(totals)
            for item, counted in prepared:
                with self._autocast():
                    parts = self.stage.score(self.model, item)
                sums.update({name: float(value) * counted for name, value in parts.items()})
        return self._metrics(Counter(self._reduce(sums)), weights)


def _add(total: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        total[name] = total.get(name, 0.0) + value


def _format(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value:.4f}" for name, value in metrics.items())
