"""The processes of a run that was launched as several, by `accelerate launch` or `torchrun`.

All of them run the same program. What is prepared before training is prepared by the main process first, and the others
read it from the cache; gradients are averaged by torch, weights sharded where FSDP is asked for; whatever is decoded is
shared out and gathered, so that every process goes on with the same values; logs, tables and files come from the main
process. In a run of one process every function here does nothing but its work.

Objects travel by gloo on the CPU whatever the device, pickled; they come from processes of the same run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from recbole_dgr2.system import launch

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = timedelta(days=7)
"""How long a process waits for another: the main one may train a retriever meanwhile. The launcher ends all when one
fails, so nothing waits for a process that is gone."""

_FSDP = {
    "version": "2",
    "reshard_after_forward": "true",
    "offload_params": "false",
    "activation_checkpointing": "false",
    "cpu_ram_efficient_loading": "false",
}
"""What accelerate's `fsdp_config` must say; its launcher passes it on as FSDP_VERSION and so on."""

logger = logging.getLogger(__name__)


class Stopped(RuntimeError):
    """Another process failed, and says why; this one has nothing to add."""


def start() -> None:
    """Join the other processes of the launch, if there are any.

    Call it before a RecBole config is built, which would hide all GPUs but one.

    Raises:
        ValueError: DeepSpeed, or FSDP of another kind than `trainer.placement` does.
    """
    if _asked("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "accelerate's distributed_type DEEPSPEED: it needs CUDA, and FSDP shards the same; expected FSDP, as in "
            "properties/accelerate/gpus_8_fsdp.yaml"
        )
    for name, value in _FSDP.items() if _asked("ACCELERATE_USE_FSDP") else ():
        found = os.environ.get(f"FSDP_{name.upper()}", value).lower()
        if found != value:
            raise ValueError(
                f"accelerate's fsdp_config: fsdp_{name} is {found}, expected {value}, "
                "as in properties/accelerate/gpus_8_fsdp.yaml"
            )
    if launch.as_several():
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
        _group()
    elif os.environ.get("MASTER_ADDR") and "ACCELERATE_MIXED_PRECISION" in os.environ:
        logger.warning(
            "accelerate launch was asked for several processes and started one; on CPUs use: "
            "accelerate launch --config_file properties/accelerate/cpus_2.yaml run_recbole_dgr2.py ..."
        )


def finish() -> None:
    """Leave the other processes, at the end of the program."""
    if dist.is_initialized():
        _group.cache_clear()
        dist.destroy_process_group()


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


def sharded() -> bool:
    """Whether the weights of a stage in training are to be sharded over the processes."""
    return world() > 1 and _asked("ACCELERATE_USE_FSDP")


def world() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the process that logs and writes."""
    return rank() == 0


def label() -> str:
    """This process for a message; empty where there is only one."""
    return f" (process {rank()} of {world()})" if world() > 1 else ""


def local_share(cores: int) -> int:
    """Cores for this process, of those of the machine that all its processes share; at least 1."""
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or world()))


def lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    text = str(error).lower()
    return world() > 1 and (
        isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "connection"))
    )


def accelerator() -> Accelerator:
    """What puts a stage on its device. The config of the run decides precision and accumulation, not the launcher."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, patch_environment

    start()
    constant = DistributedDataParallelKwargs(broadcast_buffers=False)  # no buffer of a causal LM is trained
    with patch_environment(accelerate_use_fsdp="false"):  # sharding is the loop's own, on any device
        made = Accelerator(mixed_precision="no", kwargs_handlers=[constant])
    made.gradient_accumulation_steps = 1
    return made


@lru_cache(maxsize=1)
def _group() -> Any:
    """The processes over gloo; made by all of them together, at their first exchange."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def wait() -> None:
    """Go on when every process has come this far."""
    if world() > 1:
        dist.barrier(group=_group())


def gather(value: T) -> list[T]:
    """The value of each process, in the order of their ranks, in every process."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group=_group())
    return values


def _told(value: Any) -> Any:
    """The main process's value, in every process."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_group())
    return values[0]


@contextmanager
def main_first() -> Iterator[None]:
    """The main process runs the block, then the others run it, and find in the cache what it left there.

    Raises:
        Stopped: in the others, where the main process failed in it.
    """
    if world() == 1:
        yield
    elif not is_main():
        if not _told(None):
            raise Stopped("the main process failed")
        yield
    else:
        try:
            yield
        except BaseException:
            _told(False)
            raise
        _told(True)


def from_main(compute: Callable[[], T]) -> T:
    """What the main process computes, in every process; the others wait meanwhile and leave the machine to it.

    Raises:
        Stopped: in the others, where the main process failed.
    """
    if world() == 1:
        return compute()
    value: Any = None
    with main_first():
        if is_main():
            value = compute()
    return _told(value)


def spread(items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
    """The results of `work`, one an item, in the order of the items, in every process.

    Item i is worked on by process `i % world`, and by no other. `work` must give every item the result that it would
    have among any others.
    """
    if world() == 1:
        return list(work(items))
    own = items[rank() :: world()]
    found: list[Any] = [None] * len(items)
    for place, part in enumerate(gather(list(work(own)) if len(own) else [])):
        found[place :: world()] = part
    return found


def require_same(values: dict[str, Any], where: str) -> None:
    """Go on when every process has come this far with the same values.

    Raises:
        ValueError: they differ; names which.
    """
    others = gather(values)
    differ = sorted(name for name in values if any(other.get(name) != values[name] for other in others))
    if differ and not is_main():
        raise Stopped("the processes differ")
    if differ:
        raise ValueError(
            f"{where}: {', '.join(differ)} not the same in all {world()} processes; they must share one file system, "
            "cache_dir and run_dir, and machines of one kind"
        )
