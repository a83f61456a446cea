"""The decoder layers of Llama's family and Gemma's in one call: the hot path of small models on a
CPU.

A transformers layer of width 256 spends most of its time between its operators. Here the whole
stack (fused query-key-value and gate-up products, rotary embedding, cache write, paged attention,
gated MLP) is one nopython function over packed weights, with no Python in between. Each row's
arithmetic is independent of the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SILU, GELU = 0, 1  # what a gate goes through


class LlamaShape(NamedTuple):
    """Sizes and constants of the stack. ``softcap`` bends the scores of attention, 0: it does not.
    Embeddings are multiplied by ``embedding_scale`` in float32."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    softcap: float = 0.0
    activation: int = SILU
    embedding_scale: float = 1.0

    @property
    def constants(self) -> tuple[float, ...]:
        """From the number of heads to the activation: what `kernels.llama.cpu.forward` takes."""
        return self[3:10]

    @property
    def product_bytes(self) -> int:
        """Of what a token is multiplied with, in bfloat16."""
        per_head = 2 * (self.heads + self.kv_heads) * self.head_dim
        return 2 * self.layers * self.hidden * (per_head + 3 * self.intermediate)


class LlamaWeights(NamedTuple):
    """All layers stacked along the first axis, products packed as ``kernels.linear.pack`` does, in
    the order in which kernels take them: ``[L, panels, K, 16]``, or half of K in words of two.

    Arrays that a family lacks (biases, query and key norms, norms of what a product adds to the
    hidden states) have size 0 along the last axis. ``gate_up`` holds the gate's panels, then the up
    projection's. Layers differ in which table of angles turns their queries and keys, and in how
    many tokens they look back, 0: all.

    Of a rank (`kernels.parallel`) ``attention_output`` and ``down``, whose columns are divided,
    have an axis of leaves behind the first, and each half of ``gate_up`` fills whole panels.
    """

    attention_norm: npt.NDArray[Any]  # [L, d]
    qkv: npt.NDArray[Any]  # [L, panels, d, 16]
    qkv_bias: npt.NDArray[Any]  # [L, (H + 2 Hkv) D] or [L, 0]
    query_norm: npt.NDArray[Any]  # [L, D] or [L, 0]
    key_norm: npt.NDArray[Any]  # [L, D] or [L, 0]
    attention_output: npt.NDArray[Any]  # [L, panels, H D, 16]
    attended_norm: npt.NDArray[Any]  # [L, d] or [L, 0]
    mlp_norm: npt.NDArray[Any]  # [L, d]
    gate_up: npt.NDArray[Any]  # [L, panels, d, 16]
    down: npt.NDArray[Any]  # [L, panels, intermediate, 16]
    inner_norm: npt.NDArray[Any]  # [L, d] or [L, 0]
    final_norm: npt.NDArray[Any]  # [d]
    cosine: npt.NDArray[Any]  # [tables, max positions, D / 2]
    sine: npt.NDArray[Any]  # [tables, max positions, D / 2]
    tables: npt.NDArray[np.int64]  # [L]
    windows: npt.NDArray[np.int64]  # [L]


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
