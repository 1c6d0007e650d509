"""Jobs for a writer of traces, and how it samples."""

from __future__ import annotations

from recbole_dgr2.data.rejection import Job, Mode, SamplingOptions
from tests.reranking import task


def sampling(mode: Mode = "rejection", temperature: float = 1.0) -> SamplingOptions:
    return SamplingOptions(mode, 2, temperature, 0)


def jobs(count: int = 1, attempt: int = 0, note: int | None = None) -> list[Job]:
    return [Job(task(key=key), attempt, note) for key in range(count)]
