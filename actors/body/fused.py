"""The fused body of the Llama family: the hot path of small models on a CPU.

Same weights and same cache as the general body, one nopython call a step (``kernels.llama``). The
loader checks it against the general body before it serves. Families: llama, mistral, qwen2, qwen3
(grouped queries, biases on the fused product, query and key norms, one sliding window for all
layers).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from actors.body.batch import Batch
from kernels import pool
from kernels.attention import BLOCK_SIZE
from kernels.linear import fits_bfloat16, pack
from kernels.linear.tile import PANEL
from kernels.llama import LlamaShape, LlamaStack, LlamaWeights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def supports(config: Any) -> bool:
    """Whether the fused body computes what this transformers configuration describes."""
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    if getattr(config, "mlp_bias", False) or config.hidden_size % PANEL:
        return False
    if config.intermediate_size % PANEL:
        return False
    windowed = set(getattr(config, "layer_types", None) or ())
    if len(windowed) > 1:
        return False
    biased = getattr(config, "attention_bias", False)
    return not (config.model_type in ("llama", "qwen3") and biased)


def _window(config: Any) -> int:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and "sliding_attention" not in kinds:
        return 0
    if not kinds and not getattr(config, "use_sliding_window", config.model_type == "mistral"):
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


def _stack_packed(weights: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    half = all(fits_bfloat16(weight) for weight in weights)
    return np.stack([pack(weight, half=half).panels for weight in weights])


def _stack(tensors: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    return np.stack([tensor.detach().float().numpy() for tensor in tensors])


class FusedBody:
    """Body over packed weights; see ``actors.body.batch.Body`` for the contract."""

    name = "fused"
    device = torch.device("cpu")

    def __init__(
        self,
        shape: LlamaShape,
        weights: LlamaWeights,
        embedding: np.ndarray[Any, Any],
        max_positions: int,
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._embedding = embedding
        self._key_cache: np.ndarray[Any, Any] | None = None
        self._value_cache: np.ndarray[Any, Any] | None = None
        self.batch_invariant = True
        self.hidden_size = shape.hidden
        self.vocabulary_size = embedding.shape[0]
        self.num_layers = shape.layers
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.max_positions = max_positions

    @classmethod
    def from_model(cls, model: Any) -> FusedBody:
        """Pack the weights of a transformers causal language model that ``supports`` admits."""
        config, decoder = model.config, model.base_model
        layers = list(decoder.layers)
        attentions = [layer.self_attn for layer in layers]
        head_dim = attentions[0].head_dim
        empty = torch.zeros(0)

        def qkv_bias(attention: Any) -> torch.Tensor:
            if attention.q_proj.bias is None:
                return empty
            return torch.cat(
                [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            )

        def head_norm(attention: Any, name: str) -> torch.Tensor:
            norm = getattr(attention, name, None)
            return empty if norm is None else norm.weight

        positions = torch.arange(config.max_position_embeddings)[None]
        cosine, sine = decoder.rotary_emb(torch.zeros(1, 1, 1), positions)
        weights = LlamaWeights(
            attention_norm=_stack([layer.input_layernorm.weight for layer in layers]),
            qkv=_stack_packed(
                [torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]) for a in attentions]
            ),
            qkv_bias=_stack([qkv_bias(a) for a in attentions]),
            query_norm=_stack([head_norm(a, "q_norm") for a in attentions]),
            key_norm=_stack([head_norm(a, "k_norm") for a in attentions]),
            attention_output=_stack_packed([a.o_proj.weight for a in attentions]),
            mlp_norm=_stack([layer.post_attention_layernorm.weight for layer in layers]),
            gate_up=_stack_packed(
                [
                    torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
                    for layer in layers
                ]
            ),
            down=_stack_packed([layer.mlp.down_proj.weight for layer in layers]),
            final_norm=decoder.norm.weight.detach().float().numpy(),
            cosine=cosine[0, :, : head_dim // 2].contiguous().float().numpy(),
            sine=sine[0, :, : head_dim // 2].contiguous().float().numpy(),
        )
        shape = LlamaShape(
            layers=len(layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            epsilon=config.rms_norm_eps,
            scale=float(attentions[0].scaling),
            window=_window(config),
        )
        table = decoder.embed_tokens.weight.detach().float().contiguous()
        if fits_bfloat16(table):
            embedding = (table.numpy().view(np.uint32) >> 16).astype(np.uint16)
        else:
            embedding = table.numpy()
        return cls(shape, weights, embedding, config.max_position_embeddings)

    def kv_bytes_per_block(self) -> int:
        shape = self._shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * BLOCK_SIZE * 4

    def allocate_cache(self, num_blocks: int) -> None:
        """Reserve zeroed blocks for every layer (pages are touched when first written)."""
        shape = self._shape
        heads, dim = shape.kv_heads, shape.head_dim
        self._key_cache = np.zeros(
            (shape.layers, num_blocks, heads, dim, BLOCK_SIZE), dtype=np.float32
        )
        self._value_cache = np.zeros(
            (shape.layers, num_blocks, heads, BLOCK_SIZE, dim), dtype=np.float32
        )

    @property
    def stack(self) -> LlamaStack:
        """What kernels that go on from the hidden states take. RuntimeError before
        `allocate_cache`."""
        if self._key_cache is None or self._value_cache is None:
            raise RuntimeError("call allocate_cache before stack")
        return LlamaStack(
            self._shape, self._weights, self._embedding, self._key_cache, self._value_cache
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of ``batch.output_rows`` after the final norm: ``[N, d] float32``.

        With several threads each takes whole sequences: their rows need nothing of each other.
        """
        if self._key_cache is None or self._value_cache is None:
            raise RuntimeError("call allocate_cache before forward")
        out = np.empty((batch.output_rows.shape[0], self._shape.hidden), dtype=np.float32)
        rows_of = np.bincount(batch.row_sequence, minlength=batch.block_tables.shape[0])
        bounds = np.concatenate([[0], np.cumsum(rows_of)])
        pieces = []
        for first, last in pool.even_shares(rows_of.tolist(), pool.threads()):
            rows = slice(int(bounds[first]), int(bounds[last]))
            wanted = np.searchsorted(batch.output_rows, [rows.start, rows.stop])
            pieces.append(partial(self._forward_rows, batch, rows, slice(*wanted.tolist()), out))
        pool.run(pieces)
        return torch.from_numpy(out)

    def _forward_rows(
        self, batch: Batch, rows: slice, wanted: slice, out: np.ndarray[Any, Any]
    ) -> None:
        """The batch's ``rows`` into the ``wanted`` rows of ``out``."""
        from kernels.llama import cpu

        shape, weights = self._shape, self._weights
        cpu.forward(
            self.embed(batch.token_ids[rows]),
            batch.positions[rows],
            batch.slots[rows],
            batch.row_sequence[rows],
            batch.block_tables,
            batch.output_rows[wanted] - np.int32(rows.start),
            weights.attention_norm,
            weights.qkv,
            weights.qkv_bias,
            weights.query_norm,
            weights.key_norm,
            weights.attention_output,
            weights.mlp_norm,
            weights.gate_up,
            weights.down,
            weights.final_norm,
            weights.cosine,
            weights.sine,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.epsilon,
            shape.scale,
            shape.window,
            self._key_cache,
            self._value_cache,
            out[wanted],
        )

    def embed(self, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Fresh float32 rows ``[T, d]``; bfloat16 bits are widened as they are gathered."""
        rows = self._embedding[token_ids]
        if rows.dtype == np.uint16:
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows
