"""The fused body of the Llama family and of Gemma's: the hot path of small models on a CPU.

Same weights and same cache as the general body, one nopython call a step (``kernels.llama``). The
loader checks it against the general body before it serves. Families: those of
`actors.body.families` (grouped queries, biases on the fused product, query and key norms, norms of
what is added, soft caps, windows and rotations by layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lexshard.actors.body.attention_step import AttentionSettings
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.families import FAMILIES, GEMMA, norms_of
from lexshard.kernels import pool
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import kept_on_cpu, words_of
from lexshard.kernels.linear import Arithmetic, arithmetic_of, fits_bfloat16, pack
from lexshard.kernels.linear.compact import compacted, should_be_compact, stacked
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama import GELU, SILU, LlamaShape, LlamaStack, LlamaWeights
from lexshard.kernels.quantize.layout import aligned

EMBEDDING = "model.embed_tokens.weight"

# A weight by its name, None where there is none of that name.
Tensors = Callable[[str], torch.Tensor | None]


# What a gate goes through, by transformers' name for it.
_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}


def supports(config: Any) -> bool:
    """Whether the fused body computes what this transformers configuration describes."""
    if config.model_type not in FAMILIES or getattr(config, "is_heterogeneous", False):
        return False
    if _activation(config) not in _ACTIVATIONS:
        return False
    if getattr(config, "mlp_bias", False) or config.hidden_size % PANEL:
        return False
    if config.intermediate_size % PANEL or getattr(config, "use_bidirectional_attention", False):
        return False
    biased = getattr(config, "attention_bias", False)
    return not (config.model_type in ("llama", "qwen3", "smollm3", *GEMMA) and biased)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def plan_of(model: Any, arithmetic: Arithmetic, config: Any = None) -> FusedPlan:
    """Of a transformers causal language model that ``supports`` admits. Where that has the first
    layers alone, and layers of every kind among them, ``config`` is of the whole."""
    config, decoder = config or model.config, model.base_model
    attention = decoder.layers[0].self_attn
    family = config.model_type
    shape = LlamaShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        epsilon=config.rms_norm_eps,
        scale=float(attention.scaling),
        softcap=_softcap(config),
        activation=_ACTIVATIONS[_activation(config)],
        embedding_scale=_embedding_scale(decoder, family),
    )
    kinds = layer_kinds(config)
    turns = [_rotation(decoder.rotary_emb, kind) for kind in kinds]
    rotations = list(dict.fromkeys(turns))
    return FusedPlan(
        family,
        shape,
        tuple(rotations),
        tuple(map(rotations.index, turns)),
        tuple(_window(config, kind.attention) for kind in kinds),
        config.max_position_embeddings,
        arithmetic,
    )


class LayerKind(NamedTuple):
    """How a layer attends, by transformers' name for it, "" where a model has one kind; and whether
    it turns its queries and keys."""

    attention: str
    turns: bool


def layer_kinds(config: Any) -> list[LayerKind]:
    """Of every layer."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * layers
    turns = getattr(config, "no_rope_layers", None) or [True] * layers  # 1 where there is one
    return [LayerKind(kind, bool(each)) for kind, each in zip(kinds, turns, strict=True)]


def _rotation(rotary: Any, kind: LayerKind) -> RotaryAngles:
    name = f"{kind.attention}_" if hasattr(rotary, f"{kind.attention}_inv_freq") else ""
    frequencies = getattr(rotary, f"{name}inv_freq").float()
    if not kind.turns:
        return RotaryAngles((0.0,) * len(frequencies), 1.0)
    scale = float(getattr(rotary, f"{name}attention_scaling"))
    return RotaryAngles(tuple(frequencies.tolist()), scale)


def _window(config: Any, kind: str) -> int:
    """How many tokens a layer of a kind looks back, 0: all."""
    slides = config.model_type == "mistral"  # in every layer, whatever else its description says
    if kind == "sliding_attention" or (not kind and slides):
        return int(getattr(config, "sliding_window", None) or 0)
    return 0


def _softcap(config: Any) -> float:
    """Of attention, 0: none. Descriptions of Gemma 3 have one that its layers do not use."""
    return float(config.attn_logit_softcapping or 0.0) if config.model_type == "gemma2" else 0.0


def _embedding_scale(decoder: Any, family: str) -> float:
    """What embeddings are multiplied by."""
    if family not in GEMMA:
        return 1.0
    embedding = decoder.embed_tokens
    return float(embedding.embed_scale.to(embedding.weight.dtype))


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

    Layers have their rotation and their window, 0: none, by number. ``arithmetic`` is what
    activations are rounded to before they are multiplied; bfloat16 needs weights that are.
    """

    family: str
    shape: LlamaShape
    rotations: tuple[RotaryAngles, ...]
    rotation_of: tuple[int, ...]  # [L] which of them
    windows: tuple[int, ...]  # [L]
    max_positions: int
    arithmetic: Arithmetic

    def attention(self) -> list[AttentionSettings]:
        """What each layer's attention computes."""
        shape = self.shape
        return [AttentionSettings(shape.scale, each, shape.softcap) for each in self.windows]

    def by_layer(self) -> dict[str, np.ndarray[Any, Any]]:
        """The fields of `LlamaWeights` that are no weights."""
        tables = [each.tables(self.max_positions) for each in self.rotations]
        cosine, sine = (np.stack(each) for each in zip(*tables, strict=True))
        return {
            "cosine": cosine,
            "sine": sine,
            "tables": np.array(self.rotation_of, np.int64),
            "windows": np.array(self.windows, np.int64),
        }


class _Stacks:
    """Weights of all layers, one layer after the other along the first axis."""

    def __init__(self, plan: FusedPlan, tensor: Tensors) -> None:
        self._layers = range(plan.shape.layers)
        self._arithmetic = plan.arithmetic
        rounds = plan.arithmetic == "bfloat16"
        self._compact = rounds and should_be_compact(plan.shape.product_bytes)
        self._tensor = tensor

    def packed(self, *names: str) -> np.ndarray[Any, Any]:
        """Those of ``names`` below each other, as `kernels.linear.pack` packs them: in bfloat16
        where that is exact in every layer, and compact where that is faster."""
        half = all(fits_bfloat16(_there(each, self._tensor)) for each in self._every(names))
        if half and self._compact and (compact := stacked(self._compacted(names))) is not None:
            return compact
        out: np.ndarray[Any, Any] | None = None
        for layer in self._layers:
            panels = self._panels(layer, names, half)
            if out is None:
                out = aligned((len(self._layers), *panels.shape), panels.dtype)
            out[layer] = panels
        assert out is not None, "a model has layers"
        return out

    def _panels(self, layer: int, names: tuple[str, ...], half: bool) -> np.ndarray[Any, Any]:
        whole = torch.cat(self._in_layer(layer, names))
        return pack(whole, half=half, arithmetic=self._arithmetic).panels

    def _compacted(self, names: tuple[str, ...]) -> Iterator[np.ndarray[Any, Any] | None]:
        return (compacted(self._panels(layer, names, True)) for layer in self._layers)

    def norm(self, name: str, added: float) -> np.ndarray[Any, Any]:
        """Those of ``name``, with ``added``; of size 0 where the family has none."""
        return self.plain(name) + np.float32(added)

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
        self._cache_dtype = kept_on_cpu(
            shape.head_dim, rounds=arithmetic_of(weights.qkv) == "bfloat16"
        )
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
        stacks = _Stacks(plan, tensor)
        attention, mlp = "self_attn.{}_proj", "mlp.{}_proj"
        projections = [attention.format(name) for name in "qkv"]
        norms = norms_of(plan.family)
        added = norms.added
        weights = LlamaWeights(
            attention_norm=stacks.norm("input_layernorm.weight", added),
            qkv=stacks.packed(*(f"{name}.weight" for name in projections)),
            qkv_bias=stacks.plain(*(f"{name}.bias" for name in projections)),
            query_norm=stacks.norm("self_attn.q_norm.weight", added),
            key_norm=stacks.norm("self_attn.k_norm.weight", added),
            attention_output=stacks.packed(f"{attention.format('o')}.weight"),
            attended_norm=stacks.norm(norms.attended, added),
            mlp_norm=stacks.norm(norms.mlp, added),
            gate_up=stacks.packed(f"{mlp.format('gate')}.weight", f"{mlp.format('up')}.weight"),
            down=stacks.packed(f"{mlp.format('down')}.weight"),
            inner_norm=stacks.norm(norms.inner, added),
            final_norm=_there("model.norm.weight", tensor).float().numpy() + np.float32(added),
            **plan.by_layer(),
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
        """Fresh float32 rows ``[T, d]``, scaled; bfloat16 bits are widened as they are gathered."""
        rows = self._embedding.take(token_ids, axis=0)
        if rows.dtype == np.uint16:
            rows = np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)
        if self._shape.embedding_scale != 1.0:
            rows *= np.float32(self._shape.embedding_scale)
        return rows
