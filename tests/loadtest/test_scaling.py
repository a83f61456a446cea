"""The model of more cores gives back what it was made from, and no more than memory allows."""

from __future__ import annotations

import pytest

from lexshard.loadtest.scaling import CORES, Measured, told

# A step of 10 ms, of which two threads that read twice as fast save 4; they meet 100 times.
CACHED = Measured(10e-3, 6e-3, 1e-7, 100, 10**6, 10e9, 20e9)
# The same saved by two threads that read a third faster, of 200 MB at 20 GB/s.
FROM_MEMORY = Measured(10e-3, 7.5e-3, 0.0, 0, 200 * 10**6, 20e9, 80e9 / 3)


def test_one_thread_and_two_take_what_they_took() -> None:
    assert CACHED.step(1, 10.0) == pytest.approx(10e-3)
    assert CACHED.step(2, 10.0) == pytest.approx(6e-3)
    assert CACHED.shared == pytest.approx(8.02e-3)


def test_what_memory_limits_here_is_not_taken_for_the_work_of_one_thread() -> None:
    assert FROM_MEMORY.shared == pytest.approx(10e-3)
    assert FROM_MEMORY.step(8, 10.0) == pytest.approx(10e-3 / 8)
    assert FROM_MEMORY.step(128, 10.0) == pytest.approx(1e-3)  # 200 MB at 200 GB/s


def test_the_page_says_what_is_measured_and_what_is_modelled() -> None:
    page = told(CACHED, 10.0)
    assert "so 20% of a step is in one thread" in page
    assert page.index("measured") < page.index("modelled")
    assert page.count(" ms a step") == len(CORES)
