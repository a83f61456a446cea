"""What the layers of the Llama family are made of between their products, in nopython code.

Loops go over slices from 0 on: an index that might be negative is looked at each time, and then a
loop does not become vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.exponential.single_precision import gelu, silu
from lexshard.kernels.llama import GELU
from lexshard.kernels.ordered_sums import squares
from lexshard.kernels.processor import multiplies_matrices

Array = npt.NDArray[Any]

# Rows go through what only reads their own values so many at a time: what is between two products
# stays in the second-level cache. Matrices are multiplied faster than weights come from memory:
# there more rows share what was read.
ROWS_TOGETHER = 256 if multiplies_matrices() else 48


@njit(nogil=True, cache=True, error_model="numpy")
def _mean_square(row: Array) -> np.float32:
    return squares(row) / np.float32(row.shape[0])


@njit(nogil=True, cache=True, error_model="numpy")
def normalize(x: Array, weight: Array, epsilon: float, out: Array) -> None:
    """RMSNorm of every row: ``out = weight * x / sqrt(mean(x^2) + epsilon)``. ``x [T, d]``."""
    for t in range(x.shape[0]):
        factor = np.float32(1.0) / np.sqrt(_mean_square(x[t]) + np.float32(epsilon))
        for j in range(x.shape[1]):
            out[t, j] = weight[j] * (x[t, j] * factor)


@njit(nogil=True, cache=True, error_model="numpy")
def add_normalized(
    x: Array, weight: Array, epsilon: float, first: int, last: int, out: Array
) -> None:
    """RMSNorm of every row of ``x``, added to the columns ``first`` to ``last - 1`` of ``out``."""
    for t in range(out.shape[0]):
        factor = np.float32(1.0) / np.sqrt(_mean_square(x[t]) + np.float32(epsilon))
        own, scale, target = x[t, first:last], weight[first:last], out[t, first:last]
        for j in range(last - first):
            target[j] += scale[j] * (own[j] * factor)


@njit(nogil=True, cache=True, error_model="numpy")
def split_heads(
    packed: Array,
    first: int,
    bias: Array,
    norm: Array,
    epsilon: float,
    low: int,
    high: int,
    out: Array,
) -> None:
    """Copy the columns from ``first`` on into the heads ``low`` to ``high - 1`` of ``out [T, heads,
    D]``, adding bias, norming heads."""
    dim = out.shape[2]
    for t in range(out.shape[0]):
        for head in range(low, high):
            start = first + head * dim
            own, target = packed[t, start : start + dim], out[t, head]
            for j in range(dim):
                target[j] = own[j]
            if bias.shape[0] > 0:
                added = bias[start : start + dim]
                for j in range(dim):
                    target[j] += added[j]
            if norm.shape[0] > 0:
                factor = np.float32(1.0) / np.sqrt(_mean_square(target) + np.float32(epsilon))
                for j in range(dim):
                    target[j] = norm[j] * (target[j] * factor)


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(x: Array, positions: Array, cosine: Array, sine: Array, low: int, high: int) -> None:
    """Rotary embedding of the heads ``low`` to ``high - 1`` in place, halves of each head paired.
    ``x [T, heads, D]``."""
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        c, s = cosine[positions[t]], sine[positions[t]]
        for head in range(low, high):
            for j in range(half):
                lower, upper = x[t, head, j], x[t, head, j + half]
                x[t, head, j] = lower * c[j] - upper * s[j]
                x[t, head, j + half] = upper * c[j] + lower * s[j]


@njit(nogil=True, cache=True, error_model="numpy")
def gate_inner(
    gate_up: Array, gate_width: int, activation: int, first: int, last: int, out: Array
) -> None:
    """``out = activation(gate) * up`` in the columns ``first`` to ``last - 1``; the up projection
    starts at column ``gate_width``."""
    for t in range(out.shape[0]):
        gate, target = gate_up[t, first:last], out[t, first:last]
        up = gate_up[t, gate_width + first : gate_width + last]
        if activation == GELU:
            for j in range(last - first):
                target[j] = gelu(gate[j]) * up[j]
        else:
            for j in range(last - first):
                target[j] = silu(gate[j]) * up[j]
