"""What every command line of the package does alike."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recbole_dgr2.system import launch

Arguments = Sequence[str] | None
INTERRUPTED = 130  # what shells give for a program that SIGINT ended


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a program as Ctrl-C does, by KeyboardInterrupt, so that half-written files are removed.

    One of several processes is left alone: it may wait for the others in a call that hears no exception, and its
    launcher ends it.
    """
    if launch.as_several() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(body: Callable[[Arguments], None]) -> Callable[..., int]:
    """Makes a `main(arguments)` of a command's body: exit status 0, or 2 with one line on stderr.

    An interrupt (Ctrl-C, SIGTERM) gives 130. Errors that a user can mend are ValueError and OSError; anything else is a
    fault of the program and is raised.
    """

    @functools.wraps(body)
    def main(arguments: Arguments = None) -> int:
        try:
            with ended_as_interrupted():
                body(arguments)
        except (ValueError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            return INTERRUPTED
        return 0

    return main


def command_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m recbole_dgr2.<name>`; `text`, the module's docstring, is its help, line for line."""
    return argparse.ArgumentParser(
        prog=f"python -m recbole_dgr2.{name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def comma_separated(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: a list of `kind`, its parts separated by commas, empty ones left out."""

    def listed(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    listed.__name__ = f"comma-separated {kind.__name__}"  # argparse says "invalid <name> value"
    return listed
