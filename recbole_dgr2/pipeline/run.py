"""What surrounds a run: seed, log file, thread count, and the wall time of its phases."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from recbole_dgr2.system import processes
from recbole_dgr2.system.threads import available_cores
from recbole_dgr2.utils import choose_threads, init_seed

LIBRARIES = (
    "recbole_dgr2",
    "recbole",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "numpy",
    "scipy",
    "pandas",
)

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

logger = logging.getLogger("recbole_dgr2")


class Run:
    """One run in its folder, as a context; use `phase` around each part of the work.

    While the context lasts, everything that is logged goes to the terminal and to `run.log`. Bad input that shows
    before `keep` was called removes the folder again if this run made it.

    Args:
        folder: where the run goes.
        seed: of all random numbers.
        threads: None measures the best number of CPU threads at the start of every phase: on a machine whose cores
            are busy, two threads can be many times slower than one.

    Of several processes the main one alone makes the folder, logs and shows warnings.
    """

    def __init__(self, folder: Path, seed: int, threads: int | None) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self._threads = threads
        self._seed = seed
        self._made: list[Path] = []
        self._kept = False
        self._log: _Log | _Silence

    def __enter__(self) -> Run:
        if processes.is_main():
            self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._log = _Log(self.folder / "run.log")
        else:
            self._log = _Silence()
        init_seed(self._seed, True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.close()
        if isinstance(error, ValueError | FileNotFoundError) and not self._kept and self.folder in self._made:
            shutil.rmtree(self.folder)
            with suppress(OSError):  # a parent that something else came into stays
                for parent in self._made[1:]:
                    parent.rmdir()

    def keep(self) -> None:
        """From here on the folder stays, whatever happens."""
        self._kept = True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times one phase and logs its beginning and end."""
        threads = self._threads or processes.from_main(_threads_of_each)
        torch.set_num_threads(threads)
        logger.info("%s: started, %d thread%s", name, threads, "" if threads == 1 else "s")
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        logger.info("%s: %.1f s", name, took)


def _threads_of_each() -> int:
    """Threads for each process of this machine."""
    return min(choose_threads(), processes.local_share(available_cores()))


def hardware() -> str:
    """Processor and cores in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} torch thread(s)"


def library_versions() -> dict[str, str]:
    """Versions of Python, the machine's platform and the libraries that decide a result."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


class _PlainFormatter(logging.Formatter):
    """Without the colours that RecBole writes into its messages."""

    def format(self, record: logging.LogRecord) -> str:
        return _COLOUR.sub("", super().format(record))


class _Silence:
    """Instead of a log: nothing below an error is shown until it is closed."""

    def __init__(self) -> None:
        logging.disable(logging.WARNING)

    def close(self) -> None:
        logging.disable(logging.NOTSET)


class _Log:
    """RecBole and the stages log to the root logger: sends it to the terminal and to a file until it is closed."""

    def __init__(self, path: Path) -> None:
        root = logging.getLogger()
        self._level = root.level
        terminal, file = logging.StreamHandler(), logging.FileHandler(path, encoding="utf-8")
        self._handlers: tuple[logging.Handler, ...] = (terminal, file)
        for handler, coloured in ((terminal, terminal.stream.isatty()), (file, False)):
            formatter = logging.Formatter if coloured else _PlainFormatter
            handler.setFormatter(formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
            root.addHandler(handler)
        root.setLevel(logging.INFO)
        for noisy in ("transformers", "accelerate", "httpx", "matplotlib"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def close(self) -> None:
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(self._level)
