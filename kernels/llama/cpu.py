"""The Llama stack on the CPU: see the package docstring."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.attention.cpu import attention_rows, write_cache_rows
from lexshard.kernels.exponential.single_precision import silu
from lexshard.kernels.linear.cpu import multiply
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.ordered_sums import squares

Array = npt.NDArray[Any]

# Rows go through what only reads their own values so many at a time: what is between two products
# stays in the second-level cache.
ROWS_TOGETHER = 48


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
def _heads(packed: Array, first: int, bias: Array, norm: Array, epsilon: float, out: Array) -> None:
    """Copy the columns from ``first`` on into ``out [T, heads, D]``, adding bias, norming heads."""
    heads, dim = out.shape[1], out.shape[2]
    for t in range(out.shape[0]):
        for head in range(heads):
            start = first + head * dim
            for j in range(dim):
                out[t, head, j] = packed[t, start + j]
            if bias.shape[0] > 0:
                for j in range(dim):
                    out[t, head, j] += bias[start + j]
            if norm.shape[0] > 0:
                factor = np.float32(1.0) / np.sqrt(_mean_square(out[t, head]) + np.float32(epsilon))
                for j in range(dim):
                    out[t, head, j] = norm[j] * (out[t, head, j] * factor)


@njit(nogil=True, cache=True, error_model="numpy")
def _rotate(x: Array, positions: Array, cosine: Array, sine: Array) -> None:
    """Rotary embedding in place, halves of each head paired. ``x [T, heads, D]``."""
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        c, s = cosine[positions[t]], sine[positions[t]]
        for head in range(x.shape[1]):
            for j in range(half):
                low, high = x[t, head, j], x[t, head, j + half]
                x[t, head, j] = low * c[j] - high * s[j]
                x[t, head, j + half] = high * c[j] + low * s[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _gate(gate_up: Array, gate_width: int, out: Array) -> None:
    """``out = silu(gate) * up``; the up projection starts at column ``gate_width``."""
    for t in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[t, j] = silu(gate_up[t, j]) * gate_up[t, gate_width + j]


@njit(nogil=True, cache=True, error_model="numpy")
def forward(
    hidden: Array,
    positions: Array,
    slots: Array,
    row_sequence: Array,
    block_tables: Array,
    output_rows: Array,
    attention_norm: Array,
    qkv: Array,
    qkv_bias: Array,
    query_norm: Array,
    key_norm: Array,
    attention_output: Array,
    mlp_norm: Array,
    gate_up: Array,
    down: Array,
    final_norm: Array,
    cosine: Array,
    sine: Array,
    heads: int,
    kv_heads: int,
    head_dim: int,
    epsilon: float,
    scale: float,
    window: int,
    key_cache: Array,
    value_cache: Array,
    out: Array,
) -> None:
    """Embeddings ``hidden [T, d]`` (overwritten) to ``out [N, d]``, the normed ``output_rows``.

    Writes keys and values at ``slots [T]`` of the caches ``[L, blocks, ...]``. In the last layer
    only the output rows go on after the cache is written: the others are not read.
    """
    layers = qkv.shape[0]
    width = hidden.shape[1]
    rows = hidden.shape[0]
    gate_width = gate_up.shape[1] * PANEL // 2
    few = min(rows, ROWS_TOGETHER)
    normed = np.empty((few, width), dtype=np.float32)
    packed = np.empty((few, qkv.shape[1] * PANEL), dtype=np.float32)
    query = np.empty((rows, heads, head_dim), dtype=np.float32)
    key = np.empty((few, kv_heads, head_dim), dtype=np.float32)
    value = np.empty((few, kv_heads, head_dim), dtype=np.float32)
    attended = np.empty((rows, heads, head_dim), dtype=np.float32)
    gates = np.empty((few, gate_up.shape[1] * PANEL), dtype=np.float32)
    inner_rows = np.empty((few, gate_width), dtype=np.float32)
    no_norm = np.empty(0, dtype=np.float32)
    for layer in range(layers):
        bias = qkv_bias[layer]
        for start in range(0, rows, ROWS_TOGETHER):
            stop = min(start + ROWS_TOGETHER, rows)
            count = stop - start
            normalize(hidden[start:stop], attention_norm[layer], epsilon, normed)
            multiply(normed[:count], qkv[layer], packed, False)
            own, keys = query[start:stop], key[:count]
            _heads(packed, 0, bias, query_norm[layer], epsilon, own)
            _heads(packed, heads * head_dim, bias, key_norm[layer], epsilon, keys)
            _heads(packed, (heads + kv_heads) * head_dim, bias, no_norm, epsilon, value[:count])
            _rotate(own, positions[start:stop], cosine, sine)
            _rotate(keys, positions[start:stop], cosine, sine)
            write_cache_rows(
                keys, value[:count], slots[start:stop], key_cache[layer], value_cache[layer]
            )
        if layer == layers - 1:
            rows = output_rows.shape[0]
            hidden = hidden[output_rows]
            query = query[output_rows]
            positions = positions[output_rows]
            row_sequence = row_sequence[output_rows]
            attended = attended[:rows]
        attention_rows(
            query,
            key_cache[layer],
            value_cache[layer],
            block_tables,
            row_sequence,
            positions,
            scale,
            window,
            0.0,
            attended,
        )
        for start in range(0, rows, ROWS_TOGETHER):
            stop = min(start + ROWS_TOGETHER, rows)
            count = stop - start
            own_hidden = hidden[start:stop]
            own_attended = attended[start:stop].reshape(count, heads * head_dim)
            multiply(own_attended, attention_output[layer], own_hidden, True)
            normalize(own_hidden, mlp_norm[layer], epsilon, normed)
            multiply(normed[:count], gate_up[layer], gates, False)
            _gate(gates, gate_width, inner_rows[:count])
            multiply(inner_rows[:count], down[layer], own_hidden, True)
    normalize(hidden, final_norm, epsilon, out)
