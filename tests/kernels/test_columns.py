"""Rows to columns: every logit arrives, in its place, and so do the maxima of the blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.kernels.columns import write_columns

pytestmark = pytest.mark.vectors


def written(rows: np.ndarray, implementation: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    count, size = rows.shape
    logits = np.full((size, count), np.nan, np.float32)
    maxima = np.full((-(-size // 64), count), np.nan, np.float32)
    write_columns(rows, logits, maxima, implementation=implementation)  # type: ignore[arg-type]
    return logits, maxima


@given(seed=st.integers(0, 2**32), count=st.integers(1, 27), size=st.integers(1, 300))
def test_cpu_equals_reference(seed: int, count: int, size: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((count, size)).astype(np.float32)
    rows[random.random(rows.shape) < 0.1] = -np.inf
    expected, largest = written(rows, "reference")
    logits, maxima = written(rows)
    assert np.array_equal(logits, rows.T)
    assert np.array_equal(expected, rows.T)
    assert np.array_equal(maxima, largest)


@pytest.mark.parametrize("count", [1, 5, 8])
def test_rows_may_lie_anywhere(count: int) -> None:
    wide = np.random.default_rng(0).standard_normal((count * 2, 200)).astype(np.float32)
    for rows in (wide[::2], wide[:count, 3:150], np.asfortranarray(wide[:count])):
        logits, maxima = written(rows)
        assert np.array_equal(logits, rows.T)
        assert np.array_equal(maxima, written(rows, "reference")[1])


def test_what_does_not_fit_is_refused() -> None:
    rows = np.zeros((2, 65), np.float32)
    logits, maxima = np.zeros((65, 2), np.float32), np.zeros((2, 2), np.float32)
    for wrong in (
        (rows, logits, maxima[:1]),
        (rows, logits[:64], maxima),
        (rows.astype(np.float64), logits, maxima),
        (rows, np.asfortranarray(logits), maxima),
        (rows[:0], logits[:, :0], maxima[:, :0]),
    ):
        with pytest.raises(ValueError):
            write_columns(*wrong)
