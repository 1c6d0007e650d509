"""The choice of a thread count, on a clock of its own: what is chosen, and how long that may take."""

from __future__ import annotations

import math

import pytest
import torch

from recbole_dgr2.system.threads import (
    PROBE_SECONDS,
    choose_threads,
    pick_threads,
    thread_counts,
    use_threads,
)


class Machine:
    """Probes take the given seconds, in turn, and its clock moves by nothing else; a probe can be cut by a twelfth."""

    def __init__(self, times: dict[int, list[float]]) -> None:
        self.times = times
        self.calls: list[int] = []
        self.now = 100.0

    def probe(self, count: int, limit: float) -> float:
        series = self.times[count]
        takes = series[self.calls.count(count) % len(series)]
        self.calls.append(count)
        steps = next((step for step in range(1, 13) if takes * step / 12 > limit), 12)
        self.now += takes * steps / 12
        return takes if steps == 12 else math.inf

    def pick(self) -> int:
        return pick_threads(list(self.times), self.probe, 0.3, lambda: self.now)


@pytest.mark.parametrize(
    "times,chosen",
    [
        ({1: [0.01], 2: [0.4], 4: [0.4]}, 1),  # busy cores
        ({1: [0.01], 2: [0.006], 4: [0.004]}, 4),
        ({1: [0.01], 2: [0.006], 4: [0.0055]}, 2),  # not worth the cores
        ({1: [0.01], 2: [0.0095], 4: [0.0095]}, 1),
        ({1: [0.01], 2: [0.006, 0.006, 0.5], 4: [0.02]}, 2),  # a stall now and then
        ({1: [0.01], 2: [0.3, 0.3, 0.001], 4: [0.02]}, 1),  # fast now and then
        ({1: [0.01]}, 1),
    ],
)
def test_pick_threads(times: dict[int, list[float]], chosen: int) -> None:
    machine = Machine(times)
    assert machine.pick() == chosen
    assert len(machine.calls) < 200


def test_a_hopeless_count_is_probed_twice_and_cut_short() -> None:
    machine = Machine({1: [0.001], 2: [0.4]})
    assert machine.pick() == 1
    assert machine.calls.count(2) == 2
    assert machine.now <= 100 + 0.3 + 0.4 / 12


@pytest.mark.parametrize("one", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("more", [0.001, 0.5, 6.0])
def test_the_time_is_bounded_whatever_the_load(one: float, more: float) -> None:
    """The budget, and the probe of one thread or the step of more that was under way when it ended."""
    machine = Machine({1: [one], 2: [more], 4: [more]})
    chosen = machine.pick()
    assert machine.now - 100 <= 0.3 + max(one, more / 12) + 1e-9
    assert chosen == 1 or more < one


def test_too_little_time_for_three_turns_means_one_thread() -> None:
    assert Machine({1: [0.2], 2: [0.05]}).pick() == 1


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8],
    ]  # fmt: skip


def test_choose_threads_leaves_torch_alone() -> None:
    before = torch.get_num_threads()
    assert choose_threads() >= 1
    assert torch.get_num_threads() == before
    assert PROBE_SECONDS < 1


def test_a_number_of_threads_below_none_is_refused() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="threads=-1: expected a number of threads, or 0"):
        use_threads(-1)
    assert torch.get_num_threads() == before
