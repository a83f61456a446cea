"""The certified head of a model whose output weights vLLM has cut by vocabulary.

Every rank has its tokens and finds what can be drawn among them; rank 0 merges that and draws.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import msgspec
import numpy as np
import torch

from lexshard.actors.collective import ROOT, Rounds
from lexshard.actors.head.exchange import AnyMassShard
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.step import ShardStep
from lexshard.actors.messages import RowDecision
from lexshard.actors.packed_arrays import encode
from lexshard.actors.standalone.drawing_head import screened_shard
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels import pool
from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.serve_app.vllm.head import PluginHead

_decode_decisions = msgspec.msgpack.Decoder(list[RowDecision | None]).decode


class SharedHead(PluginHead):
    """The head of which each rank of ``group`` has a ``weight`` [P, d] and ``bias`` [P], P tokens
    of the vocabulary in order of rank, the last ones perhaps padding.

    All ranks ask it the same in the same order, and all get what rank 0 decides. What is raised on
    one rank is raised on all: a rank alone in a round would wait for ever.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        scale: float,
        vocabulary_size: int,
        group: Rounds,
    ) -> None:
        self._group = group
        # A block of tokens is of the rank that has its first one: noise is drawn by whole blocks.
        firsts = [-(-len(weight) * rank // BLOCK) for rank in range(group.size + 1)]
        last = blocks_of(vocabulary_size)
        self._owned = [
            OwnedRows.of_blocks(range(first, min(end, last)), vocabulary_size)
            for first, end in pairwise(firsts)
        ]
        super().__init__(weight, bias, softcap, scale, vocabulary_size)

    def is_current(self) -> bool:
        """As of a `PluginHead`, on all ranks."""
        return not self._on_any_rank(not super().is_current())

    def decide(self, hidden: torch.Tensor, names: RowNames) -> list[RowDecision | None]:
        """As of a `PluginHead`, on every rank what rank 0 decides."""
        if self._on_any_rank(not bool(torch.isfinite(hidden).all())):
            raise NonFiniteHiddenError(range(len(hidden)))
        pool.begin_step(len(hidden))
        ids = [each.ids for each in self._owned[self._group.rank :]]
        step = ShardStep(cast(AnyMassShard, self._head.head), ids, self._group)
        states = hidden.detach().float().contiguous()
        found = step.take(states, self.states.table(names))
        if found is None:
            return _decode_decisions(self._group.broadcast())
        decided = self._decided(names, found)
        self._group.broadcast(encode(decided))
        return decided

    def _shard(
        self, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, scale: float
    ) -> OutputHead:
        rows = self._whole_blocks(weight)
        biases = None if bias is None else self._whole_blocks(bias.detach())
        given = [each for each in (rows, biases) if each is not None]
        sound = all(torch.linalg.vector_norm(each, torch.inf).isfinite() for each in given)
        if self._on_any_rank(not sound):
            raise ValueError("the output weights or biases of a rank contain NaN or infinity")
        return screened_shard(rows, biases, softcap, scale, self._owned[self._group.rank])

    def _whole_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """The ``rows`` [P, ...] of blocks that begin on this rank: where P is not a multiple of a
        block, a copy that ends with the next rank's first rows."""
        size, rank = len(rows), self._group.rank
        if size % BLOCK == 0:
            return rows
        told = self._group.gather(rows[:BLOCK].float().cpu().numpy().tobytes())
        firsts = self._group.broadcast(b"".join(told) if rank == ROOT else None)
        shape = self._group.size, BLOCK, *rows.shape[1:]
        every = torch.frombuffer(bytearray(firsts), dtype=torch.float32).view(shape)
        skipped, lacking = -rank * size % BLOCK, -(rank + 1) * size % BLOCK
        following = every[(rank + 1) % len(every), :lacking]  # of the last rank: padding, if any
        return torch.cat([rows[skipped:], following.to(rows)])

    def _on_any_rank(self, holds: bool) -> bool:
        return bool(self._group.all_reduce_max(np.array([float(holds)]))[0])
