"""The fused body of the Llama family: the hot path of small models on a CPU.

Same weights and same cache as the general body, one nopython call a step (``kernels.llama``). The
loader checks it against the general body before it serves. Families: llama, mistral, qwen2, qwen3
(grouped queries, biases on the fused product, query and key norms, one sliding window for all
layers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.families import FAMILIES
from lexshard.kernels import pool
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import kept_on_cpu, words_of
from lexshard.kernels.linear import Arithmetic, fits_bfloat16, pack
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama import LlamaShape, LlamaStack, LlamaWeights

EMBEDDING = "model.embed_tokens.weight"

# A weight by its name, None where there is none of that name.
Tensors = Callable[[str], torch.Tensor | None]


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


def plan_of(model: Any, arithmetic: Arithmetic) -> FusedPlan:
    """Of a transformers causal language model that ``supports`` admits."""
    config, decoder = model.config, model.base_model
    attention = decoder.layers[0].self_attn
    rotary = decoder.rotary_emb
    shape = LlamaShape(
        layers=len(decoder.layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        epsilon=config.rms_norm_eps,
        scale=float(attention.scaling),
        window=_window(config),
    )
    rotation = RotaryAngles(
        tuple(rotary.inv_freq.float().tolist()), float(rotary.attention_scaling)
    )
    return FusedPlan(shape, rotation, config.max_position_embeddings, arithmetic)


def _window(config: Any) -> int:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and "sliding_attention" not in kinds:
        return 0
    if not kinds and not getattr(config, "use_sliding_window", config.model_type == "mistral"):
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Rotary position embedding: ``scale * cos(position * frequency)``, and the same of the sine,
    for each of ``frequencies [D / 2]``, all float32."""

    frequencies: tuple[float, ...]
    scale: float

    def tables(self, positions: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Cosines and sines of the first ``positions``: ``[positions, D / 2]`` float32 each."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        scale = np.float32(self.scale)
        return angles.cos().numpy() * scale, angles.sin().numpy() * scale


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """What a fused body is beside its weights.

    ``arithmetic`` is what activations are rounded to before they are multiplied; bfloat16 needs
    weights that are.
    """

    shape: LlamaShape
    rotation: RotaryAngles
    max_positions: int
    arithmetic: Arithmetic


class _Stacks:
    """Weights of all layers, one layer after the other along the first axis."""

    def __init__(self, layers: int, arithmetic: Arithmetic, tensor: Tensors) -> None:
        self._layers = range(layers)
        self._arithmetic = arithmetic
        self._tensor = tensor

    def packed(self, *names: str) -> np.ndarray[Any, Any]:
        """Those of ``names`` below each other, as `kernels.linear.pack` packs them: in bfloat16
        where that is exact in every layer."""
        half = all(fits_bfloat16(_there(each, self._tensor)) for each in self._every(names))
        out: np.ndarray[Any, Any] | None = None
        for layer in self._layers:
            whole = torch.cat(self._in_layer(layer, names))
            panels = pack(whole, half=half, arithmetic=self._arithmetic).panels
            if out is None:
                out = np.empty((len(self._layers), *panels.shape), panels.dtype)
            out[layer] = panels
        assert out is not None, "a model has layers"
        return out

    def plain(self, *names: str) -> np.ndarray[Any, Any]:
        """Those of ``names`` after each other in float32; of size 0 where the family has none."""
        if self._tensor(self._name(0, names[0])) is None:
            return np.zeros((len(self._layers), 0), dtype=np.float32)
        return np.stack(
            [torch.cat(self._in_layer(layer, names)).float().numpy() for layer in self._layers]
        )

    def _in_layer(self, layer: int, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [_there(self._name(layer, name), self._tensor) for name in names]

    def _every(self, names: tuple[str, ...]) -> Iterator[str]:
        return (self._name(layer, name) for layer in self._layers for name in names)

    def _name(self, layer: int, name: str) -> str:
        return f"model.layers.{layer}.{name}"


def _there(name: str, tensor: Tensors) -> torch.Tensor:
    found = tensor(name)
    if found is None:
        raise KeyError(name)
    return found


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
        self._cache_dtype = kept_on_cpu(shape.head_dim, rounds=weights.qkv.dtype == np.uint32)
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
    def from_tensors(cls, plan: FusedPlan, tensor: Tensors) -> FusedBody:
        """Pack weights that ``tensor`` gives by the names they have in a checkpoint of one of
        ``FAMILIES``, layer by layer: none is held twice for longer than it takes to pack it.

        Raises KeyError for a weight that there must be and is not.
        """
        shape = plan.shape
        stacks = _Stacks(shape.layers, plan.arithmetic, tensor)
        attention, mlp = "self_attn.{}_proj", "mlp.{}_proj"
        projections = [attention.format(name) for name in "qkv"]
        cosine, sine = plan.rotation.tables(plan.max_positions)
        weights = LlamaWeights(
            attention_norm=stacks.plain("input_layernorm.weight"),
            qkv=stacks.packed(*(f"{name}.weight" for name in projections)),
            qkv_bias=stacks.plain(*(f"{name}.bias" for name in projections)),
            query_norm=stacks.plain("self_attn.q_norm.weight"),
            key_norm=stacks.plain("self_attn.k_norm.weight"),
            attention_output=stacks.packed(f"{attention.format('o')}.weight"),
            mlp_norm=stacks.plain("post_attention_layernorm.weight"),
            gate_up=stacks.packed(f"{mlp.format('gate')}.weight", f"{mlp.format('up')}.weight"),
            down=stacks.packed(f"{mlp.format('down')}.weight"),
            final_norm=_there("model.norm.weight", tensor).float().numpy(),
            cosine=cosine,
            sine=sine,
        )
        table = _there(EMBEDDING, tensor).contiguous()
        if fits_bfloat16(table):
            embedding = table.bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            embedding = table.float().numpy()
        return cls(shape, weights, embedding, plan.max_positions)

    def unrounded(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Hidden states ``[T, d]`` of a whole sequence in float64, from the same weights and
        constants, but nothing is rounded before it is multiplied: slow."""
        from lexshard.kernels.llama import reference

        shape, blocks = self._shape, -(-len(token_ids) // BLOCK_SIZE)
        caches = allocate_cache(shape.layers * blocks, shape.kv_heads, shape.head_dim)
        keys, values = (
            each.numpy().reshape(shape.layers, blocks, *each.shape[1:]) for each in caches
        )
        stack = LlamaStack(shape, self._weights, self._embedding, keys, values)
        hidden = reference.forward(stack, token_ids, 0, np.arange(blocks), rounds=False)
        return torch.from_numpy(hidden).float()

    def kv_bytes_per_block(self) -> int:
        shape = self._shape
        numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * BLOCK_SIZE
        return numbers * self._cache_dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        """Reserve zeroed blocks for every layer (pages are touched when first written)."""
        shape = self._shape
        keys, values = allocate_cache(
            shape.layers * num_blocks, shape.kv_heads, shape.head_dim, dtype=self._cache_dtype
        )
        self._key_cache, self._value_cache = (
            words_of(each).reshape(shape.layers, num_blocks, *each.shape[1:])
            for each in (keys, values)
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
        """Hidden states of ``batch.output_rows`` after the final norm: ``[N, d] float32``."""
        from lexshard.kernels.llama import cpu

        if self._key_cache is None or self._value_cache is None:
            raise RuntimeError("call allocate_cache before forward")
        out = np.empty((batch.output_rows.shape[0], self._shape.hidden), dtype=np.float32)
        cpu.forward(
            *pool.team(),
            self.embed(batch.token_ids),
            batch.positions,
            batch.slots,
            batch.row_sequence,
            batch.block_tables,
            batch.output_rows,
            *self._weights,
            *self._shape.constants,
            self._key_cache,
            self._value_cache,
            out,
        )
        return torch.from_numpy(out)

    def embed(self, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Fresh float32 rows ``[T, d]``; bfloat16 bits are widened as they are gathered."""
        rows = self._embedding.take(token_ids, axis=0)
        if rows.dtype == np.uint16:
            return np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)
        return rows
