"""The fused body of the Llama family and of Gemma's: the hot path of small models on a CPU.

Same weights and same cache as the general body, one nopython call a step (``kernels.llama``). The
loader checks it against the general body before it serves. Families: those of
`actors.body.families` (grouped queries, biases on the fused product, query and key norms, norms of
what is added, soft caps, windows and rotations by layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.attention_step import AttentionSettings
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.checkpoint import positions_of
from lexshard.actors.body.families import FAMILIES, GEMMA, norms_of
from lexshard.actors.body.parallel.share import RankShare, columns_of
from lexshard.actors.body.parallel.slices import Slices, there
from lexshard.kernels import pool
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import kept_on_cpu, words_of
from lexshard.kernels.linear import Arithmetic, arithmetic_of, fits_bfloat16, pack
from lexshard.kernels.linear.compact import compacted, should_be_compact, stacked
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama import GELU, SILU, LlamaShape, LlamaStack, LlamaWeights
from lexshard.kernels.quantize.layout import aligned

EMBEDDING = "model.embed_tokens.weight"

Array = npt.NDArray[Any]
Rows = tuple[str, range | None]  # of a weight of a layer by its name there, None: all

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
        positions_of(config),
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
    turns = turns[:layers]  # which may tell of more
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

    def tables(self, positions: int) -> tuple[Array, Array]:
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

    def by_layer(self) -> dict[str, Array]:
        """The fields of `LlamaWeights` that are no weights."""
        tables = [each.tables(self.max_positions) for each in self.rotations]
        cosine, sine = (np.stack(each) for each in zip(*tables, strict=True))
        return {
            "cosine": cosine,
            "sine": sine,
            "tables": np.array(self.rotation_of, np.int64),
            "windows": np.array(self.windows, np.int64),
        }


def read_stacks(plan: FusedPlan, slices: Slices, share: RankShare | None = None) -> LlamaWeights:
    """What ``share`` says of the weights that a checkpoint of one of ``FAMILIES`` has, packed for
    `kernels.parallel`; without it all of them, for `kernels.llama`. Layer by layer: none is held
    twice for longer than it takes to pack it.

    Raises KeyError for a weight that there must be and is not.
    """
    read, norms = _Stacks(plan, slices, share), norms_of(plan.family)
    own, width = share or RankShare(0, 1, plan.shape, 0), plan.shape.head_dim
    heads, kv_heads = columns_of(own.heads, width), columns_of(own.kv_heads, width)
    parts = tuple(zip("qkv", (heads, kv_heads, kv_heads), strict=True))
    gated = tuple((f"mlp.{name}_proj.weight", own.inner) for name in ("gate", "up"))
    return LlamaWeights(
        attention_norm=read.norm("input_layernorm.weight"),
        qkv=read.rows(*((f"self_attn.{name}_proj.weight", rows) for name, rows in parts)),
        qkv_bias=read.plain(*((f"self_attn.{name}_proj.bias", rows) for name, rows in parts)),
        query_norm=read.norm("self_attn.q_norm.weight"),
        key_norm=read.norm("self_attn.k_norm.weight"),
        attention_output=read.columns("self_attn.o_proj.weight", heads),
        attended_norm=read.norm(norms.attended),
        mlp_norm=read.norm(norms.mlp),
        gate_up=read.rows(*gated, filled=True),
        down=read.columns("mlp.down_proj.weight", own.inner),
        inner_norm=read.norm(norms.inner),
        final_norm=there("model.norm.weight", slices).float().numpy() + np.float32(norms.added),
        **plan.by_layer(),
    )


def read_embedding(slices: Slices, tokens: range | None = None) -> Array:
    """The rows of ``tokens``, None: all; as `LlamaStack` has them."""
    table = there(EMBEDDING, slices, tokens).contiguous()
    if fits_bfloat16(table):
        return table.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return np.asarray(table.float().numpy())


class _Stacks:
    """Parts of the weights of every layer, one layer after the other along the first axis."""

    def __init__(self, plan: FusedPlan, slices: Slices, share: RankShare | None) -> None:
        self._layers = range(plan.shape.layers)
        self._added = np.float32(norms_of(plan.family).added)  # to the weights of norms
        self._arithmetic = plan.arithmetic
        self._leaves = None if share is None else share.leaves
        rounds = plan.arithmetic == "bfloat16"
        self._compact = share is None and rounds and should_be_compact(plan.shape.product_bytes)
        self._slices = slices

    def norm(self, name: str) -> Array:
        """In float32, as it is multiplied with; of size 0 where the family has none."""
        return np.asarray(self.plain((name, None)) + self._added)

    def plain(self, *parts: Rows) -> Array:
        """After each other in float32; of size 0 where the family has none."""
        if self._slices(_in_layer(0, parts[0][0]), range(1), None) is None:
            return np.zeros((len(self._layers), 0), np.float32)
        return np.stack([torch.cat(self._of(n, parts)).float().numpy() for n in self._layers])

    def rows(self, *parts: Rows, filled: bool = False) -> Array:
        """Packed below each other; where ``filled``, each up to a whole panel."""

        def of_layer(layer: int) -> list[torch.Tensor]:
            found = self._of(layer, parts)
            return [torch.cat([_filled(one) for one in found] if filled else found)]

        return np.asarray(self._stacked(of_layer)[:, 0])

    def columns(self, name: str, columns: range) -> Array:
        """Packed, leaf by leaf where there are leaves."""

        def of_layer(layer: int) -> list[torch.Tensor]:
            found = there(_in_layer(layer, name), self._slices, None, columns)
            return [*found.chunk(self._leaves or 1, 1)]

        packed = self._stacked(of_layer)
        return packed if self._leaves else np.asarray(packed[:, 0])

    def _of(self, layer: int, parts: Sequence[Rows]) -> list[torch.Tensor]:
        return [there(_in_layer(layer, name), self._slices, rows) for name, rows in parts]

    def _stacked(self, of_layer: Callable[[int], list[torch.Tensor]], half: bool = True) -> Array:
        """``[L, weights of a layer, panels, K, 16]``, packed as `kernels.linear.pack` does: in
        bfloat16 where that is exact in every layer, and compact where that is faster."""
        if half and self._compact:
            compact = stacked(self._compacted(*of_layer(layer)) for layer in self._layers)
            if compact is not None:
                return compact[:, None]
        out: Array | None = None
        for layer in self._layers:
            weights = of_layer(layer)
            if half and not all(map(fits_bfloat16, weights)):
                out = None  # all is packed again
                return self._stacked(of_layer, half=False)
            packed = [pack(each, half=half, arithmetic=self._arithmetic).panels for each in weights]
            if out is None:
                out = aligned((len(self._layers), len(packed), *packed[0].shape), packed[0].dtype)
            for place, panels in enumerate(packed):
                out[layer, place] = panels
        assert out is not None, "a model has layers"
        return out

    def _compacted(self, weight: torch.Tensor) -> Array | None:
        exact = fits_bfloat16(weight)
        return compacted(pack(weight, half=True, arithmetic="bfloat16").panels) if exact else None


def _in_layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _filled(weight: torch.Tensor) -> torch.Tensor:
    short = -weight.shape[0] % PANEL
    return torch.nn.functional.pad(weight, (0, 0, 0, short)) if short else weight


class FusedBody:
    """Body over packed weights; see ``actors.body.batch.Body`` for the contract."""

    name = "fused"
    device = torch.device("cpu")

    def __init__(
        self, shape: LlamaShape, weights: LlamaWeights, embedding: Array, max_positions: int
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._embedding = embedding
        self._cache_dtype = kept_on_cpu(
            shape.head_dim, rounds=arithmetic_of(weights.qkv) == "bfloat16"
        )
        self._key_cache: Array | None = None
        self._value_cache: Array | None = None
        self.batch_invariant = True
        self.hidden_size = shape.hidden
        self.vocabulary_size = embedding.shape[0]
        self.num_layers = shape.layers
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.max_positions = max_positions

    @classmethod
    def from_slices(cls, plan: FusedPlan, slices: Slices) -> FusedBody:
        """Of all weights. Raises KeyError for one that there must be and is not."""
        weights = read_stacks(plan, slices)
        return cls(plan.shape, weights, read_embedding(slices), plan.max_positions)

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

    def embed(self, token_ids: Array) -> Array:
        """Fresh float32 rows ``[T, d]``, scaled; bfloat16 bits are widened as they are gathered."""
        rows = self._embedding.take(token_ids, axis=0)
        if rows.dtype == np.uint16:
            rows = np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)
        if self._shape.embedding_scale != 1.0:
            rows *= np.float32(self._shape.embedding_scale)
        return rows
