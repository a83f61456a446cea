"""What one rank does of the stack, on one thread: see the package docstring."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.attention.cpu import attention_rows, write_cache_rows
from lexshard.kernels.copies import copy_into
from lexshard.kernels.linear.cpu import multiply_panels
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama.parts import (
    add_normalized,
    gate_inner,
    normalize,
    rotate,
    split_heads,
)
from lexshard.kernels.parallel import ROWS_AT_ONCE
from lexshard.kernels.parallel.exchange import add_up

Array = npt.NDArray[Any]

# A literal 0 in a call would compile what is called once more.
_ZERO = np.int64(0)


@njit(nogil=True, cache=True)
def subtree(x: Array, weight: Array, columns: Array, sums: Array) -> None:
    """``sums[0, :T]`` becomes the sum of this rank's leaves, added in pairs, then pairs of pairs:
    ``x [T, leaves * columns]`` times ``weight [leaves, panels, columns, 16]``, transposed."""
    leaves, panels = weight.shape[0], np.int64(weight.shape[1])
    rows, width = x.shape[0], columns.shape[1]
    for leaf in range(leaves):
        for row in range(rows):
            copy_into(columns[row], x[row, leaf * width : (leaf + 1) * width])
        own = operand(columns[:rows], weight, weight.shape[2])
        multiply_panels(own, weight[leaf], sums[leaf], False, _ZERO, panels)
    apart = 1
    while apart < leaves:
        for leaf in range(0, leaves, 2 * apart):
            for row in range(rows):
                for j in range(sums.shape[2]):
                    sums[leaf, row, j] += sums[leaf + apart, row, j]
        apart *= 2


@njit(nogil=True, cache=True)
def _add_sums(exchange: Any, sums: Array, norm: Array, epsilon: float, hidden: Array) -> bool:
    """``hidden [T, d]`` grows by what all ranks have in ``sums[0, :T]``, normed where there is a
    ``norm``; whether all took part."""
    rows = hidden.shape[0]
    if not add_up(exchange, sums[0, :rows].reshape(rows * hidden.shape[1])):
        return False
    if norm.shape[0] > 0:
        add_normalized(sums[0], norm, epsilon, _ZERO, np.int64(hidden.shape[1]), hidden)
        return True
    for row in range(rows):
        for j in range(hidden.shape[1]):
            hidden[row, j] += sums[0, row, j]
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def forward(
    exchange: Any,
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
    attended_norm: Array,
    mlp_norm: Array,
    gate_up: Array,
    down: Array,
    inner_norm: Array,
    final_norm: Array,
    cosine: Array,
    sine: Array,
    tables: Array,
    windows: Array,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    epsilon: float,
    scale: float,
    softcap: float,
    activation: int,
    key_cache: Array,
    value_cache: Array,
    out: Array,
) -> bool:
    """Embeddings ``hidden [T, d]`` to ``out [N, d]``, the normed ``output_rows``, with the other
    ranks of ``exchange``; whether all of them took part to the end. Where not, ``out`` and what was
    written to the caches mean nothing.

    ``hidden``, which is written to, holds the embeddings that this rank has, and -0.0 in the rows
    of others, which changes no number that it is added to. ``intermediate``, ``heads`` and
    ``kv_heads`` are this rank's. In the last layer only output rows go on after the cache is
    written.
    """
    rows, width = hidden.shape
    together = min(rows, ROWS_AT_ONCE)
    gate_panels = np.int64(gate_up.shape[1] // 2)
    packed = np.empty((together, qkv.shape[1] * PANEL), np.float32)
    query = np.empty((rows, heads, head_dim), np.float32)
    attended = np.empty((rows, heads, head_dim), np.float32)
    gates = np.empty((together, gate_up.shape[1] * PANEL), np.float32)
    inner = np.empty((together, gate_panels * PANEL), np.float32)
    normed = np.empty((together, width), np.float32)
    key = np.empty((together, kv_heads, head_dim), np.float32)
    value = np.empty((together, kv_heads, head_dim), np.float32)
    sums = np.empty((down.shape[1], together, width), np.float32)
    attended_columns = heads * head_dim // attention_output.shape[1]
    attended_leaf = np.empty((together, attended_columns), np.float32)
    inner_leaf = np.empty((together, intermediate // down.shape[1]), np.float32)
    up = gate_panels * PANEL  # column of the up projection
    no_norm = np.empty(0, np.float32)
    for start in range(0, rows, ROWS_AT_ONCE):
        own = hidden[start : min(start + ROWS_AT_ONCE, rows)]
        if not add_up(exchange, own.reshape(own.shape[0] * width)):
            return False
    for layer in range(qkv.shape[0]):
        bias, table = qkv_bias[layer], tables[layer]
        for start in range(0, rows, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, rows)
            count = stop - start
            normalize(hidden[start:stop], attention_norm[layer], epsilon, normed)
            x = operand(normed[:count], qkv, qkv.shape[2])
            multiply_panels(x, qkv[layer], packed, False, _ZERO, np.int64(qkv.shape[1]))
            own_query, keys, values = query[start:stop], key[:count], value[:count]
            at, begin = positions[start:stop], heads * head_dim
            split_heads(packed, 0, bias, query_norm[layer], epsilon, 0, heads, own_query)
            split_heads(packed, begin, bias, key_norm[layer], epsilon, 0, kv_heads, keys)
            begin += kv_heads * head_dim
            split_heads(packed, begin, bias, no_norm, epsilon, 0, kv_heads, values)
            rotate(own_query, at, cosine[table], sine[table], 0, heads)
            rotate(keys, at, cosine[table], sine[table], 0, kv_heads)
            own_slots = slots[start:stop]
            write_cache_rows(
                keys, values, own_slots, 0, kv_heads, key_cache[layer], value_cache[layer]
            )
        if layer == qkv.shape[0] - 1:
            rows = output_rows.shape[0]
            last_hidden = np.empty((rows, width), np.float32)
            last_query = np.empty((rows, heads, head_dim), np.float32)
            for row in range(rows):
                copy_into(last_hidden[row], hidden[output_rows[row]])
                for head in range(heads):
                    copy_into(last_query[row, head], query[output_rows[row], head])
            hidden, query, attended = last_hidden, last_query, attended[:rows]
            positions, row_sequence = positions[output_rows], row_sequence[output_rows]
        attention_rows(
            query,
            key_cache[layer],
            value_cache[layer],
            block_tables,
            row_sequence,
            positions,
            scale,
            windows[layer],
            softcap,
            0,
            kv_heads,
            0,
            1,
            attended,
        )
        for start in range(0, rows, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, rows)
            count = stop - start
            own = hidden[start:stop]
            seen = attended[start:stop].reshape(count, heads * head_dim)
            subtree(seen, attention_output[layer], attended_leaf, sums)
            if not _add_sums(exchange, sums, attended_norm[layer], epsilon, own):
                return False
            normalize(own, mlp_norm[layer], epsilon, normed)
            x = operand(normed[:count], gate_up, gate_up.shape[2])
            multiply_panels(x, gate_up[layer], gates, False, _ZERO, 2 * gate_panels)
            gate_inner(gates, up, activation, _ZERO, up, inner[:count])
            subtree(inner[:count], down[layer], inner_leaf, sums)
            if not _add_sums(exchange, sums, inner_norm[layer], epsilon, own):
                return False
    normalize(hidden, final_norm, epsilon, out)
    return True
