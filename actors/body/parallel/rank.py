"""One rank of a parallel body: its part of the weights and of the cache, and its part of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.families import norms_of
from lexshard.actors.body.fused import EMBEDDING, FusedPlan
from lexshard.actors.body.parallel.share import RankShare, columns_of
from lexshard.actors.body.parallel.slices import Slices, there
from lexshard.actors.body.parallel.sums import RankGroup
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import kept_on_cpu, words_of
from lexshard.kernels.linear import arithmetic_of, fits_bfloat16, pack
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.parallel import Exchange, RankWeights, alone
from lexshard.kernels.quantize.layout import aligned

Array = npt.NDArray[Any]


class BodyRank:
    """What ``share`` says of the model that ``plan`` describes, read by ``slices``.

    Raises KeyError for a weight that there must be and is not.
    """

    def __init__(self, plan: FusedPlan, share: RankShare, slices: Slices) -> None:
        self.share = share
        self.shape = share.shape
        self.device = torch.device("cpu")
        self.description = ""  # of what a GPU does
        self._weights = _read_weights(plan, share, slices)
        table = there(EMBEDDING, slices, share.tokens).contiguous()
        if fits_bfloat16(table):
            self._embedding = table.bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            self._embedding = table.float().numpy()
        rounds = arithmetic_of(self._weights.qkv) == "bfloat16"
        self._cache_dtype = kept_on_cpu(self.shape.head_dim, rounds=rounds)
        self._caches: tuple[Array, Array] | None = None

    @property
    def weight_bytes(self) -> int:
        """Of what this rank has of the checkpoint, and of norms and angles, which all have."""
        return self._embedding.nbytes + sum(each.nbytes for each in self._weights)

    @property
    def kv_bytes_per_block(self) -> int:
        shape = self.shape
        numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * BLOCK_SIZE
        return numbers * self._cache_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Zeroed blocks of 16 tokens of this rank's heads, for every layer."""
        shape = self.shape
        self._caches = None  # before there are others
        keys, values = (
            words_of(each).reshape(shape.layers, num_blocks, *each.shape[1:])
            for each in allocate_cache(
                shape.layers * num_blocks, shape.kv_heads, shape.head_dim, dtype=self._cache_dtype
            )
        )
        self._caches = keys, values

    def forward(self, batch: Batch, exchange: RankGroup) -> torch.Tensor | None:
        """Hidden states of ``batch.output_rows`` after the final norm, ``[N, d]``, equal on all
        ranks; None where one of them did not take part to the end."""
        from lexshard.kernels.parallel import cpu  # numba compiles on first use

        if self._caches is None:
            raise RuntimeError("call allocate before forward")
        assert isinstance(exchange, Exchange), "compiled code adds by an exchange"
        out = np.empty((batch.output_rows.shape[0], self.shape.hidden), np.float32)
        whole = cpu.forward(
            exchange,
            self._embed(batch.token_ids),
            batch.positions,
            batch.slots,
            batch.row_sequence,
            batch.block_tables,
            batch.output_rows,
            *self._weights,
            self.shape.intermediate,
            *self.shape.constants,
            *self._caches,
            out,
        )
        return torch.from_numpy(out) if whole else None

    def record(self, sequences: int, blocks: int) -> None:
        """Nothing is recorded on a CPU."""

    def memory(self) -> tuple[int, int]:
        """Of a GPU, which it has not."""
        raise RuntimeError("a rank on a CPU has no memory of its own")

    def warm_up(self) -> None:
        """Loads or compiles all that `forward` calls. Leaves the rank without a cache."""
        self.allocate(1)
        some = np.zeros(1, np.int32)
        batch = Batch(some, some, some.astype(np.int64), some, some[None], some)
        self.forward(batch, alone())
        self._caches = None

    def _embed(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Rows ``[T, d]`` of the tokens that this rank has, -0.0 for others: added to a number it
        leaves every bit of it."""
        tokens = self.share.tokens
        own = (token_ids >= tokens.start) & (token_ids < tokens.stop)
        found = self._embedding[token_ids[own] - tokens.start]
        if found.dtype == np.uint16:
            found = (found.astype(np.uint32) << 16).view(np.float32)
        rows = np.full((token_ids.shape[0], self.shape.hidden), -0.0, np.float32)
        rows[own] = found * np.float32(self.shape.embedding_scale)
        return rows


def _read_weights(plan: FusedPlan, share: RankShare, slices: Slices) -> RankWeights:
    width = plan.shape.head_dim
    heads, kv_heads = columns_of(share.heads, width), columns_of(share.kv_heads, width)
    read = _LayerReader(plan, share.leaves, slices)
    attention = "self_attn.{}_proj"
    projections = tuple(
        (attention.format(name), rows)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    norms = norms_of(plan.family)
    gated = tuple((f"mlp.{name}_proj.weight", share.inner) for name in ("gate", "up"))
    return RankWeights(
        attention_norm=read.norm("input_layernorm.weight"),
        qkv=read.rows(*((f"{name}.weight", rows) for name, rows in projections)),
        qkv_bias=read.plain(*((f"{name}.bias", rows) for name, rows in projections)),
        query_norm=read.norm("self_attn.q_norm.weight"),
        key_norm=read.norm("self_attn.k_norm.weight"),
        attention_output=read.columns("self_attn.o_proj.weight", heads),
        attended_norm=read.norm(norms.attended),
        mlp_norm=read.norm(norms.mlp),
        gate_up=read.rows(*gated, filled=True),
        down=read.columns("mlp.down_proj.weight", share.inner),
        inner_norm=read.norm(norms.inner),
        final_norm=there("model.norm.weight", slices).float().numpy() + np.float32(norms.added),
        **plan.by_layer(),
    )


class _LayerReader:
    """Parts of the weights of every layer, one layer after the other along the first axis."""

    def __init__(self, plan: FusedPlan, leaves: int, slices: Slices) -> None:
        self._layers = plan.shape.layers
        self._added = np.float32(norms_of(plan.family).added)  # to the weights of norms
        self._arithmetic = plan.arithmetic
        self._leaves = leaves
        self._slices = slices

    def norm(self, name: str) -> Array:
        """In float32, as it is multiplied with; of size 0 where the family has none."""
        return np.asarray(self.plain((name, None)) + self._added)

    def plain(self, *parts: tuple[str, range | None]) -> Array:
        """After each other in float32; of size 0 where the family has none."""
        if self._slices(_in_layer(0, parts[0][0]), range(1), None) is None:
            return np.zeros((self._layers, 0), np.float32)
        return np.stack([torch.cat(self._of(n, parts)).float().numpy() for n in self._every])

    def rows(self, *parts: tuple[str, range], filled: bool = False) -> Array:
        """Packed below each other; where ``filled``, each up to a whole panel."""

        def of_layer(layer: int) -> list[torch.Tensor]:
            found = self._of(layer, parts)
            return [torch.cat([_filled(one) for one in found] if filled else found)]

        return np.asarray(self._stacked(of_layer)[:, 0])

    def columns(self, name: str, columns: range) -> Array:
        """Packed leaf by leaf."""

        def of_layer(layer: int) -> list[torch.Tensor]:
            found = there(_in_layer(layer, name), self._slices, None, columns)
            return [*found.chunk(self._leaves, 1)]

        return self._stacked(of_layer)

    @property
    def _every(self) -> range:
        return range(self._layers)

    def _of(self, layer: int, parts: Sequence[tuple[str, range | None]]) -> list[torch.Tensor]:
        return [there(_in_layer(layer, name), self._slices, rows) for name, rows in parts]

    def _stacked(self, of_layer: Callable[[int], list[torch.Tensor]], half: bool = True) -> Array:
        """``[L, weights of a layer, panels, K, 16]``, packed, in bfloat16 where that is exact in
        every layer: none is held twice for longer than it takes to pack it."""
        out: Array | None = None
        for layer in self._every:
            weights = of_layer(layer)
            if half and not all(map(fits_bfloat16, weights)):
                return self._stacked(of_layer, half=False)
            packed = [pack(each, half=half, arithmetic=self._arithmetic).panels for each in weights]
            if out is None:
                out = aligned((self._layers, len(packed), *packed[0].shape), packed[0].dtype)
            for place, panels in enumerate(packed):
                out[layer, place] = panels
        assert out is not None, "a model has layers"
        return out


def _in_layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _filled(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
