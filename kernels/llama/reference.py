"""The Llama stack in float64, one sequence at a time, obviously right. What products round to
bfloat16 is rounded here, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.kernels.attention import reference as attention
from lexshard.kernels.linear import PackedWeight, unpack
from lexshard.kernels.linear.reference import rounded
from lexshard.kernels.llama import GELU, LlamaStack

Array = npt.NDArray[Any]


def embed(stack: LlamaStack, token_ids: Sequence[int]) -> Array:
    """The embeddings ``[T, d]`` of tokens."""
    rows = stack.embedding[np.asarray(token_ids, np.int64)]
    if rows.dtype == np.uint16:
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float64) * np.float32(stack.shape.embedding_scale)


def forward(
    stack: LlamaStack, token_ids: Sequence[int], start: int, table: Array, *, rounds: bool = True
) -> Array:
    """Hidden states ``[T, d]``, normed, of the tokens at position ``start`` and after.

    The keys and values before them are in the blocks of ``table`` already; theirs are written.
    Without ``rounds`` products round nothing, whatever the weights are packed for.
    """
    shape, weights = stack.shape, stack.weights
    width = shape.head_dim
    positions = np.arange(start, start + len(token_ids))
    hidden = embed(stack, token_ids)
    for layer in range(shape.layers):
        normed = _normalized(hidden, weights.attention_norm[layer], shape.epsilon)
        heads = shape.heads + 2 * shape.kv_heads
        qkv = _product(normed, weights.qkv[layer], heads * width, rounds)
        if weights.qkv_bias.shape[1]:
            qkv = qkv + weights.qkv_bias[layer]
        qkv = qkv.reshape(len(positions), heads, width)
        query, key, value = np.split(qkv, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        if weights.query_norm.shape[1]:
            query = _normalized(query, weights.query_norm[layer], shape.epsilon)
            key = _normalized(key, weights.key_norm[layer], shape.epsilon)
        query = _rotated(query, stack, layer, positions)
        key = _rotated(key, stack, layer, positions)
        attended = _attended(stack, layer, table, positions, query, key, value)
        added = _product(attended, weights.attention_output[layer], shape.hidden, rounds)
        hidden = hidden + _perhaps_normalized(added, weights.attended_norm[layer], shape.epsilon)
        normed = _normalized(hidden, weights.mlp_norm[layer], shape.epsilon)
        gate_up = _product(normed, weights.gate_up[layer], 2 * shape.intermediate, rounds)
        gate, up = np.split(gate_up, 2, axis=1)
        added = _product(
            _gated(gate, shape.activation) * up, weights.down[layer], shape.hidden, rounds
        )
        hidden = hidden + _perhaps_normalized(added, weights.inner_norm[layer], shape.epsilon)
    return _normalized(hidden, weights.final_norm, shape.epsilon)


def _product(x: Array, panels: Array, count: int, rounds: bool) -> Array:
    """``x [T, K]`` times the first ``count`` rows of a packed weight: ``[T, count]``."""
    packed = PackedWeight(panels, count, x.shape[1])
    if rounds and packed.arithmetic == "bfloat16":
        x = rounded(torch.from_numpy(x).float()).double().numpy()
    return np.asarray(x @ unpack(packed).double().numpy().T)


def _normalized(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon))


def _perhaps_normalized(x: Array, weight: Array, epsilon: float) -> Array:
    return _normalized(x, weight, epsilon) if weight.size else x


def _gated(gate: Array, activation: int) -> Array:
    if activation == GELU:
        bent = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
        return np.asarray(gate / 2 * (1 + bent))
    return np.asarray(gate / (1 + np.exp(-gate)))


def _rotated(x: Array, stack: LlamaStack, layer: int, positions: Array) -> Array:
    """Rotary embedding of ``x [T, heads, D]``, halves of each head paired."""
    table = stack.weights.tables[layer]
    cosine = stack.weights.cosine[table, positions][:, None]
    sine = stack.weights.sine[table, positions][:, None]
    low, high = np.split(x, 2, axis=2)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=2)


def _attended(
    stack: LlamaStack,
    layer: int,
    table: Array,
    positions: Array,
    query: Array,
    key: Array,
    value: Array,
) -> Array:
    """What tokens at ``positions`` with ``query [T, H, D]`` attend to, once their keys and values
    are in the cache: ``[T, H D]``."""
    keys, values = (_as_tensor(each[layer]) for each in (stack.key_cache, stack.value_cache))
    slots = np.asarray(table, np.int64)[positions // BLOCK_SIZE] * BLOCK_SIZE
    own = torch.from_numpy(slots + positions % BLOCK_SIZE)
    asked, *kept = (torch.from_numpy(np.ascontiguousarray(each)) for each in (query, key, value))
    attention.write_cache(kept[0], kept[1], own, keys, values)
    out = torch.empty_like(asked)
    attention.paged_attention(
        asked,
        keys,
        values,
        torch.from_numpy(np.asarray(table))[None],
        torch.zeros(len(asked), dtype=torch.int32),
        torch.from_numpy(positions),
        stack.shape.scale,
        int(stack.weights.windows[layer]),
        stack.shape.softcap,
        out,
    )
    return out.reshape(len(asked), -1).numpy()


def _as_tensor(cache: Array) -> torch.Tensor:
    """A view, of words as `kernels.attention.allocate_cache` has them."""
    return torch.from_numpy(cache.view(np.int32) if cache.dtype == np.uint32 else cache)
