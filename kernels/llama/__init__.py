"""The decoder layers of the Llama family in one call: the hot path of small models on a CPU.

A transformers layer of width 256 spends most of its time between its operators. Here the whole
stack (fused query-key-value and gate-up products, rotary embedding, cache write, paged attention,
gated MLP) is one nopython function over packed weights, with no Python in between. Each row's
arithmetic is independent of the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt


class LlamaShape(NamedTuple):
    """Sizes and constants of the stack. ``window`` 0 means full attention."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    window: int

    @property
    def constants(self) -> tuple[float, ...]:
        """From the number of heads on: what `kernels.llama.cpu.forward` takes."""
        return self[3:]


class LlamaWeights(NamedTuple):
    """All layers stacked along the first axis, products packed as ``kernels.linear.pack`` does, in
    the order in which kernels take them: ``[L, panels, K, 16]``, or half of K in words of two.

    Arrays that a family lacks (biases, query and key norms) have size 0 along the last axis.
    ``gate_up`` holds the gate's panels, then the up projection's.
    """

    attention_norm: npt.NDArray[Any]  # [L, d]
    qkv: npt.NDArray[Any]  # [L, panels, d, 16]
    qkv_bias: npt.NDArray[Any]  # [L, (H + 2 Hkv) D] or [L, 0]
    query_norm: npt.NDArray[Any]  # [L, D] or [L, 0]
    key_norm: npt.NDArray[Any]  # [L, D] or [L, 0]
    attention_output: npt.NDArray[Any]  # [L, panels, H D, 16]
    mlp_norm: npt.NDArray[Any]  # [L, d]
    gate_up: npt.NDArray[Any]  # [L, panels, d, 16]
    down: npt.NDArray[Any]  # [L, panels, intermediate, 16]
    final_norm: npt.NDArray[Any]  # [d]
    cosine: npt.NDArray[Any]  # [max positions, D / 2]
    sine: npt.NDArray[Any]  # [max positions, D / 2]


@dataclass(frozen=True, slots=True, eq=False)
class LlamaStack:
    """The stack with its token embedding and its cache: all that turns tokens into hidden states.

    The embedding is float32, or uint16 where every value is exactly a bfloat16 (its upper bits).
    Caches as ``kernels.attention.allocate_cache`` makes them, one after the other for each layer.
    """

    shape: LlamaShape
    weights: LlamaWeights
    embedding: npt.NDArray[Any]  # [V, d]
    key_cache: npt.NDArray[Any]  # [L, blocks, Hkv, D, 16]
    value_cache: npt.NDArray[Any]  # [L, blocks, Hkv, 16, D]
