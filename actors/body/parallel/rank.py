"""One rank of a parallel body: its part of the weights and of the cache, and its part of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.fused import FusedPlan, read_embedding, read_stacks
from lexshard.actors.body.parallel.share import RankShare
from lexshard.actors.body.parallel.slices import Slices
from lexshard.actors.body.parallel.sums import RankGroup
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import kept_on_cpu, words_of
from lexshard.kernels.linear import arithmetic_of
from lexshard.kernels.parallel import Exchange, alone

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
        self._weights = read_stacks(plan, slices, share)
        self._embedding = read_embedding(slices, share.tokens)
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
