"""What the environment tells of how the program was launched; imports nothing heavy."""

from __future__ import annotations

import os

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def as_several() -> bool:
    """Whether this is one of several processes of a launch."""
    return any(int(os.environ.get(size) or 1) > 1 for size in _SIZES)
