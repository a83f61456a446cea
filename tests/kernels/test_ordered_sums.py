"""Sums have one order, whatever vectors they are computed with."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lexshard.kernels.ordered_sums import dot, squares, total
from tests.support.paths import ROOT

SIZES = (1, 15, 16, 31, 32, 33, 64, 300, 2048, 4099)


def in_order(terms: np.ndarray, lanes: int, by_pairs: bool = False) -> Any:
    """As `kernels.ordered_sums` says, number by number."""
    whole = len(terms) - len(terms) % lanes
    partial = np.zeros(lanes, terms.dtype)
    for start in range(0, whole, lanes):
        partial += terms[start : start + lanes]
    first, *others = partial.reshape(4, -1)
    if by_pairs:
        first, others = first + others[0], [others[1] + others[2]]
    for part in others:
        first = first + part
    while len(first) > 1:
        first = first[: len(first) // 2] + first[len(first) // 2 :]
    result = first[0]
    for term in terms[whole:]:
        result = result + term
    return result


@pytest.mark.parametrize("size", SIZES)
def test_every_sum_is_that_of_its_order(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(20):
        row = random.standard_normal(size).astype(np.float32)
        one, other = random.standard_normal((2, size))
        assert squares(row) == in_order(row * row, 32)
        assert dot(one, other) == in_order(one * other, 16)
        assert dot(row, other) == in_order(row.astype(np.float64) * other, 16)
        assert total(one) == in_order(one, 16, by_pairs=True)


def test_no_kernel_lets_its_compiler_order_a_sum() -> None:
    """Vectors of 512 bits would sum otherwise than those of 256: another machine, other bits."""
    told = [
        f"{path.name}: {flags}"
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        for flags in re.findall(r"fastmath=(\{[^}]*\}|\w+)", path.read_text())
        if flags not in ("False",) and re.search(r"reassoc|fast|True", flags)
    ]
    assert told == []
