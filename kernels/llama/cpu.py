"""The Llama stack on the CPU: see the package docstring.

Several threads share a step in one of two ways. Of few rows each takes some panels of every
product, some columns of what is between two of them, and some heads; then all must wait for all
before the next product. Of many rows each takes its own from layer to layer, and they wait once a
layer, where keys and values are read. Every output is one chain either way: no bit depends on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.attention.cpu import attention_rows, write_cache_rows
from lexshard.kernels.copies import copy_into, own_lines
from lexshard.kernels.linear.cpu import multiply_panels
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama.parts import (
    ROWS_TOGETHER,
    add_normalized,
    gate_inner,
    normalize,
    rotate,
    split_heads,
)
from lexshard.kernels.team.jobs import run, wait_for_all

Array = npt.NDArray[Any]

# From so many rows for each thread on, threads share rows and not panels.
ROWS_EACH = 16


@njit(nogil=True, cache=True)
def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    """What one of ``size`` threads does of ``count`` things: from the first, up to the second."""
    return count * rank // size, count * (rank + 1) // size


@njit(nogil=True, cache=True)
def _first_row(rank: int, size: int, row_sequence: Array, positions: Array) -> int:
    """The first row of one of ``size`` threads. Two neighbouring tokens, whose values may share
    words of the cache, are one thread's."""
    rows = positions.shape[0]
    row = rows * rank // size
    if 0 < row < rows and positions[row] % 2 == 1 and row_sequence[row] == row_sequence[row - 1]:
        row += 1
    return row


@njit(nogil=True, cache=True)
def _multiply_heads(
    x: Array,
    weight: Array,
    out: Array,
    heads: int,
    kv_heads: int,
    head_panels: int,
    first: int,
    last: int,
) -> None:
    """The queries, keys and values of the kv heads ``first`` to ``last - 1`` in their columns of
    ``out``; a head has ``head_panels`` panels."""
    group = heads // kv_heads
    multiply_panels(x, weight, out, False, first * group * head_panels, last * group * head_panels)
    for begin in (heads, heads + kv_heads):
        multiply_panels(
            x, weight, out, False, (begin + first) * head_panels, (begin + last) * head_panels
        )


@njit(nogil=True, cache=True, error_model="numpy")
def _add_product(
    team: Array,
    meeting: int,
    x: Array,
    weight: Array,
    norm: Array,
    epsilon: float,
    first: int,
    last: int,
    branch: Array,
    out: Array,
) -> None:
    """Adds to ``out`` what the panels ``first`` to ``last - 1`` of ``weight`` make of ``x``, and
    waits for all; where there is a ``norm``, once whole rows are in ``branch`` to be normed."""
    if norm.shape[0] > 0:
        multiply_panels(x, weight, branch, False, first, last)
        wait_for_all(team, meeting)
        add_normalized(branch, norm, epsilon, first * PANEL, last * PANEL, out)
    else:
        multiply_panels(x, weight, out, True, first, last)
    wait_for_all(team, meeting)


@njit(nogil=True, cache=True, error_model="numpy")
def _part(
    rank: int,
    size: int,
    team: Array,
    by_rows: bool,
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
    heads: int,
    kv_heads: int,
    head_dim: int,
    epsilon: float,
    scale: float,
    softcap: float,
    activation: int,
    key_cache: Array,
    value_cache: Array,
    packed: Array,
    query: Array,
    attended: Array,
    branch: Array,
    gates: Array,
    inner: Array,
    last_hidden: Array,
    last_query: Array,
    out: Array,
) -> None:
    """What one thread does of `forward`. The arrays behind the caches are shared room to work in;
    where threads share rows each has its own part of it."""
    rows, width = hidden.shape
    panels = np.int64(width // PANEL)
    gate_panels = np.int64(gate_up.shape[1] // 2)
    group = heads // kv_heads
    together = min(rows, ROWS_TOGETHER)
    # Who waits for whom between products, and what of them is this thread's.
    meeting, part, parts = (1, 0, 1) if by_rows else (size, rank, size)
    low, high = 0, rows
    if by_rows:
        low = _first_row(rank, size, row_sequence, positions)
        high = _first_row(rank + 1, size, row_sequence, positions)
    room = rank * together if by_rows else 0
    packed, gates = packed[room : room + together], gates[room : room + together]
    inner, branch = inner[room : room + together], branch[room : room + together]
    first_head, last_head = _share(kv_heads, part, parts)
    # Where heads can be shared out, a thread makes the queries, keys and values of its own, and
    # does not wait for the others' before it attends.
    by_heads = kv_heads % parts == 0 and head_dim % PANEL == 0
    head_panels = np.int64(head_dim // PANEL)
    first_qkv, last_qkv = _share(qkv.shape[1], part, parts)
    joined = 1 if by_heads else meeting
    first, last = _share(panels, part, parts)
    first_gate, last_gate = _share(gate_panels, part, parts)
    up = gate_panels * PANEL  # column of the up projection
    normed = np.empty((together, width), dtype=np.float32)
    key = np.empty((together, kv_heads, head_dim), dtype=np.float32)
    value = np.empty((together, kv_heads, head_dim), dtype=np.float32)
    no_norm = np.empty(0, dtype=np.float32)
    for layer in range(qkv.shape[0]):
        bias, table = qkv_bias[layer], tables[layer]
        for start in range(low, high, ROWS_TOGETHER):
            stop = min(start + ROWS_TOGETHER, high)
            count = stop - start
            normalize(hidden[start:stop], attention_norm[layer], epsilon, normed)
            x = operand(normed[:count], qkv, qkv.shape[2])
            if by_heads:
                _multiply_heads(
                    x, qkv[layer], packed, heads, kv_heads, head_panels, first_head, last_head
                )
            else:
                multiply_panels(x, qkv[layer], packed, False, first_qkv, last_qkv)
            wait_for_all(team, joined)
            own, keys, values = query[start:stop], key[:count], value[:count]
            at, asked = positions[start:stop], (first_head * group, last_head * group)
            begin = heads * head_dim
            split_heads(packed, 0, bias, query_norm[layer], epsilon, asked[0], asked[1], own)
            split_heads(packed, begin, bias, key_norm[layer], epsilon, first_head, last_head, keys)
            begin += kv_heads * head_dim
            split_heads(packed, begin, bias, no_norm, epsilon, first_head, last_head, values)
            rotate(own, at, cosine[table], sine[table], asked[0], asked[1])
            rotate(keys, at, cosine[table], sine[table], first_head, last_head)
            write_cache_rows(
                keys,
                values,
                slots[start:stop],
                first_head,
                last_head,
                key_cache[layer],
                value_cache[layer],
            )
            wait_for_all(team, joined)
        if by_rows:
            wait_for_all(team, size)
        if layer == qkv.shape[0] - 1:
            if by_heads and not by_rows:
                wait_for_all(team, size)
            low, high = _share(output_rows.shape[0], rank, size)
            for row in range(low, high):
                copy_into(last_hidden[row], hidden[output_rows[row]])
                for head in range(query.shape[1]):
                    copy_into(last_query[row, head], query[output_rows[row], head])
            hidden, query = last_hidden, last_query
            positions, row_sequence = positions[output_rows], row_sequence[output_rows]
            if not by_rows:
                low, high = 0, output_rows.shape[0]
                wait_for_all(team, size)
        own_heads = (first_head, last_head, 0, 1) if by_heads else (0, kv_heads, part, parts)
        attention_rows(
            query[low:high],
            key_cache[layer],
            value_cache[layer],
            block_tables,
            row_sequence[low:high],
            positions[low:high],
            scale,
            windows[layer],
            softcap,
            own_heads[0],
            own_heads[1],
            own_heads[2],
            own_heads[3],
            attended[low:high],
        )
        wait_for_all(team, meeting)
        for start in range(low, high, ROWS_TOGETHER):
            stop = min(start + ROWS_TOGETHER, high)
            count = stop - start
            own_hidden = hidden[start:stop]
            own_attended = attended[start:stop].reshape(count, heads * head_dim)
            x = operand(own_attended, attention_output, attention_output.shape[2])
            norm, weight = attended_norm[layer], attention_output[layer]
            _add_product(team, meeting, x, weight, norm, epsilon, first, last, branch, own_hidden)
            normalize(own_hidden, mlp_norm[layer], epsilon, normed)
            x = operand(normed[:count], gate_up, gate_up.shape[2])
            multiply_panels(x, gate_up[layer], gates, False, first_gate, last_gate)
            multiply_panels(
                x, gate_up[layer], gates, False, gate_panels + first_gate, gate_panels + last_gate
            )
            own_inner = inner[:count]
            gate_inner(gates, up, activation, first_gate * PANEL, last_gate * PANEL, own_inner)
            wait_for_all(team, meeting)
            x = operand(own_inner, down, down.shape[2])
            norm, weight = inner_norm[layer], down[layer]
            _add_product(team, meeting, x, weight, norm, epsilon, first, last, branch, own_hidden)
    if not by_rows:
        low, high = _share(output_rows.shape[0], rank, size)
    normalize(hidden[low:high], final_norm, epsilon, out[low:high])


@njit(nogil=True, cache=True, error_model="numpy")
def forward(
    team: Array,
    size: int,
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
) -> None:
    """Embeddings ``hidden [T, d]`` to ``out [N, d]``, the normed ``output_rows``, in
    ``size`` threads of ``team`` (`kernels.team`).

    Writes keys and values at ``slots [T]`` of the caches ``[L, blocks, ...]``. In the last layer
    only the output rows go on after the cache is written: the others are not read.
    """
    rows, width = hidden.shape
    wanted = output_rows.shape[0]
    by_rows = rows >= ROWS_EACH * size
    together = min(rows, ROWS_TOGETHER) * (size if by_rows else 1)
    gate_width = gate_up.shape[1] * PANEL
    packed = own_lines(together, qkv.shape[1] * PANEL)
    query = own_lines(rows, heads * head_dim).reshape(rows, heads, head_dim)
    attended = own_lines(rows, heads * head_dim).reshape(rows, heads, head_dim)
    branch = own_lines(together, width if attended_norm.shape[1] + inner_norm.shape[1] > 0 else 0)
    gates = own_lines(together, gate_width)
    inner = own_lines(together, gate_width // 2)
    states = own_lines(rows, width)
    for row in range(rows):
        copy_into(states[row], hidden[row])
    last_hidden = own_lines(wanted, width)
    last_query = own_lines(wanted, heads * head_dim).reshape(wanted, heads, head_dim)
    run(
        team,
        size,
        _part,
        (
            team,
            by_rows,
            states,
            positions,
            slots,
            row_sequence,
            block_tables,
            output_rows,
            attention_norm,
            qkv,
            qkv_bias,
            query_norm,
            key_norm,
            attention_output,
            attended_norm,
            mlp_norm,
            gate_up,
            down,
            inner_norm,
            final_norm,
            cosine,
            sine,
            tables,
            windows,
            heads,
            kv_heads,
            head_dim,
            epsilon,
            scale,
            softcap,
            activation,
            key_cache,
            value_cache,
            packed,
            query,
            attended,
            branch,
            gates,
            inner,
            last_hidden,
            last_query,
            out,
        ),
    )
