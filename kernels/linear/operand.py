"""What a product takes of its activations: float32 as it is, or rounded as its weight is.

Rounded once, to the nearest and ties to even. What is below the normal numbers becomes zero, as the
instructions for bfloat16 have it; NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import overload

from lexshard.kernels.linear.matrix import PAIRS
from lexshard.kernels.linear.tile import MULTIPLIES_PAIRS

_HALF = np.uint32(16)
_ONE = np.uint32(1)
_BELOW_HALF = np.uint32(0x7FFF)
_UPPER = np.uint32(0xFFFF0000)
_SIZE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_SMALLEST_NORMAL = np.uint32(0x00800000)
_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)


@njit(nogil=True, cache=True, inline="always")
def rounded_bits(bits: np.uint32) -> np.uint32:
    """The float32 of these bits as a bfloat16, whose bits are the upper half."""
    size = np.uint32(bits & _SIZE)
    nearest = np.uint32(np.uint32(bits + _BELOW_HALF) + np.uint32(np.uint32(bits >> _HALF) & _ONE))
    nearest = np.uint32(bits | _QUIET) if size > _INFINITY else nearest
    nearest = np.uint32(bits & _SIGN) if size < _SMALLEST_NORMAL else nearest
    return np.uint32(nearest & _UPPER)


@njit(nogil=True, cache=True)
def rounded_rows(x: npt.NDArray[Any], pairs: int) -> npt.NDArray[Any]:
    """``x [T, K] float32``, C-contiguous, with values of bfloat16: ``[T, 2 pairs]``, zero from
    column K on."""
    out = np.empty((x.shape[0], 2 * pairs), np.float32)
    bits, target = x.view(np.uint32), out.view(np.uint32)
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            target[row, column] = rounded_bits(bits[row, column])
        for column in range(x.shape[1], 2 * pairs):
            target[row, column] = 0
    return out


@njit(nogil=True, cache=True)
def pair_up(bits: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Bits of float32 as pairs of bfloat16, the second one in the upper half of ``out [pairs]``;
    zero behind them."""
    whole = bits.shape[0] // 2
    for pair in range(whole):
        first, second = rounded_bits(bits[2 * pair]), rounded_bits(bits[2 * pair + 1])
        out[pair] = np.uint32(second | np.uint32(first >> _HALF))
    for pair in range(whole, out.shape[0]):
        out[pair] = 0
    if 2 * whole < bits.shape[0]:
        out[whole] = np.uint32(rounded_bits(bits[2 * whole]) >> _HALF)


@njit(nogil=True, cache=True)
def paired_rows(x: npt.NDArray[Any], pairs: int) -> npt.NDArray[Any]:
    """`rounded_rows` as pairs of bfloat16: ``[T, pairs] uint32``."""
    out = np.empty((x.shape[0], pairs), np.uint32)
    bits = x.view(np.uint32)
    for row in range(x.shape[0]):
        pair_up(bits[row], out[row])
    return out


@njit(nogil=True, cache=True)
def _pairs_of(columns: int) -> int:
    """The words of a compact weight of so many columns, which does not tell them."""
    return (columns + 2 * PAIRS - 1) // (2 * PAIRS) * PAIRS


def operand(x: npt.NDArray[Any], weight: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """What tiles take for ``x [T, K] float32``, by the type of ``weight``: ``x``, or where that has
    words of two bfloat16 each, ``x`` rounded for as many ``columns`` of them, or, where it is
    compact, for as many as it has. For compiled functions."""
    raise NotImplementedError("only compiled functions call this")


@overload(operand)
def _operand(x: Any, weight: Any, columns: Any) -> Any:
    def as_it_is(x: Any, weight: Any, columns: Any) -> Any:
        return x

    def rounded(x: Any, weight: Any, columns: Any) -> Any:
        return rounded_rows(x, columns)

    def paired(x: Any, weight: Any, columns: Any) -> Any:
        return paired_rows(x, columns)

    def rounded_as_compact(x: Any, weight: Any, columns: Any) -> Any:
        return rounded_rows(x, _pairs_of(x.shape[1]))

    def paired_as_compact(x: Any, weight: Any, columns: Any) -> Any:
        return paired_rows(x, _pairs_of(x.shape[1]))

    if weight.dtype == types.uint8:
        return paired_as_compact if MULTIPLIES_PAIRS else rounded_as_compact
    if weight.dtype != types.uint32:
        return as_it_is
    return paired if MULTIPLIES_PAIRS else rounded
