"""The certified head of a model that vLLM has loaded, or why there is none: a whole one, or the
parts of it that tensor-parallel ranks have, each with its tokens of the vocabulary."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from llvmlite.binding import ffi

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Rounds
from lexshard.actors.head.exchange import AnyMassShard
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.output_rows import refuse_unsound
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.messages import RowDecision
from lexshard.actors.standalone.drawing_head import DrawingHead, screened_shard
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels import pool
from lexshard.kernels.blocks import BLOCK, blocks_of

# vLLM for CPUs looks into all that is loaded when it makes another engine in this process, and a
# compiler's library answers to every name with a function: to ``__dict__``, too, but for this.
ffi.lib._fntab["__dict__"] = {}

UNQUANTISED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
FRAME = 4096  # bytes that ranks exchange at once, and nearly always hold a whole message
SIZE = 8  # of them say how long it is


def head_refusal(processor: Any, lm_head: Any, bias: torch.Tensor | None) -> str | None:
    """Why the logits that vLLM's ``processor`` makes with ``lm_head`` cannot be certified; None if
    they can."""
    weight, rows = getattr(lm_head, "weight", None), processor.org_vocab_size
    method = type(getattr(lm_head, "quant_method", None)).__name__
    refusals = {
        "a model that computes its logits itself": processor.logits_as_input,
        "added vocabulary that is cut across tensor-parallel ranks": lm_head.tp_size > 1
        and lm_head.num_added_embeddings > 0,
        f"an output head with {method}": method not in UNQUANTISED,
        "both a soft cap and a scale": processor.soft_cap is not None and processor.scale != 1.0,
        f"a logit scale of {processor.scale}": processor.scale <= 0,
        "output weights of another type than float32 and bfloat16": weight is None
        or weight.dtype not in (torch.float32, torch.bfloat16),
        "fewer output rows than tokens": weight is not None
        and lm_head.tp_size * min(len(weight), rows if bias is None else len(bias)) < rows,
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


class PluginHead(DrawingHead):
    """With log-probabilities as vLLM gives them: those within the mask of the row."""

    def _decided(self, names: RowNames, found: Candidates) -> list[RowDecision | None]:
        for row, mask in enumerate(names.masks):
            raw = found.raw[found.offsets[row] : found.offsets[row + 1]]
            if mask is not None and len(raw) == self.vocabulary_size:  # a row that asks for them
                allowed = raw[mask.ids]
                raw[:] = -np.inf
                raw[mask.ids] = allowed
        return super()._decided(names, found)


class SharedHead(PluginHead):
    """The head of which each rank of ``group`` has a ``weight`` [P, d] and ``bias`` [P], P tokens
    of the vocabulary in order of rank, the last ones perhaps padding. Each finds what can be drawn
    among its own; all ask the same in the same order, and get what rank 0 merges and draws.

    What is raised on one rank is raised on all: a rank alone in a round would wait for ever.
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
        super().__init__(weight, bias, softcap, scale, vocabulary_size)

    def is_current(self) -> bool:
        """As of a `PluginHead`, on all ranks."""
        return not self._on_any_rank(not super().is_current())

    def decide(self, hidden: torch.Tensor, names: RowNames) -> list[RowDecision | None]:
        """As of a `PluginHead`, on every rank what rank 0 decides."""
        finite = torch.isfinite(hidden).all(dim=1).double().cpu().numpy()
        refuse_unsound(self._group.all_reduce_max(1.0 - finite) == 0.0)
        pool.begin_step(len(hidden))
        found = self._step.take(hidden.detach().float().contiguous(), self.states.table(names))
        if found is None:
            return self._decode(self._group.broadcast())
        decided = self._decided(names, found)
        self._group.broadcast(self._encode(decided))
        return decided

    def _shard(
        self, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, scale: float
    ) -> OutputHead:
        from msgspec import msgpack  # only here: one device alone does without

        from lexshard.actors.head.sharded.step import ShardStep
        from lexshard.actors.packed_arrays import encode

        self._encode, self._decode = encode, msgpack.Decoder(list[RowDecision | None]).decode
        rank, size = self._group.rank, self.vocabulary_size
        # A block of tokens is of the rank that has its first one: noise is drawn by whole blocks.
        firsts = [-(-len(weight) * each // BLOCK) for each in range(self._group.size + 1)]
        ends = pairwise(min(first, blocks_of(size)) for first in firsts)
        owned = [OwnedRows.of_blocks(range(*each), size) for each in ends]
        rows = self._whole_blocks(weight)
        biases = None if bias is None else self._whole_blocks(bias.detach())
        shard = screened_shard(rows, biases, softcap, scale, owned[rank])
        ids = [each.ids for each in owned[rank:]]
        self._step = ShardStep(cast(AnyMassShard, shard), ids, self._group)
        return shard

    def _whole_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """The ``rows`` [P, ...] of blocks that begin on this rank: where P is not a multiple of a
        block, a copy that ends with the next rank's first rows."""
        if self._on_any_rank(not bool(torch.linalg.vector_norm(rows, torch.inf).isfinite())):
            raise ValueError("the output weights or biases of a rank contain NaN or infinity")
        size, rank = len(rows), self._group.rank
        if size % BLOCK == 0:
            return rows
        told = self._group.gather(rows[:BLOCK].float().cpu().numpy().tobytes())
        firsts = self._group.broadcast(b"".join(told) if rank == ROOT else None)
        shape = -1, *rows[:BLOCK].shape
        every = torch.frombuffer(bytearray(firsts), dtype=torch.float32).view(shape)
        skipped, lacking = -rank * size % BLOCK, -(rank + 1) * size % BLOCK
        following = every[(rank + 1) % len(every), :lacking]  # of the last rank: padding, if any
        return torch.cat([rows[skipped:], following.to(rows)])

    def _on_any_rank(self, holds: bool) -> bool:
        return bool(self._group.all_reduce_max(np.array([float(holds)]))[0])


class TensorParallelGroup:
    """The tensor-parallel ranks of this process (`actors.collective.Rounds`), by the ``group`` that
    vLLM gathers its logits with, and its time-outs."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size

    def broadcast(self, message: bytes | None = None, *, patient: bool = False) -> bytes:
        return self._group.broadcast_object(message, src=ROOT)

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        every = [np.frombuffer(each) for each in self._gathered(values.tobytes())]
        return np.max(every, axis=0)

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        own = len(message).to_bytes(SIZE, "little") + message
        frames = self._gathered(own[:FRAME].ljust(FRAME, b"\0"))
        sizes = [SIZE + int.from_bytes(frame[:SIZE], "little") for frame in frames]
        if max(sizes) > FRAME:
            frames = self._gathered(own.ljust(-(-max(sizes) // SIZE) * SIZE, b"\0"))
        parts = zip(frames, sizes, strict=True)
        return tuple(frame[SIZE:size] for frame, size in parts) if self.rank == ROOT else ()

    def _gathered(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, each as long as this one, a multiple of 8 bytes."""
        # As numbers of a type that every group of vLLM's gathers; it does not look at them.
        own = torch.frombuffer(bytearray(message), dtype=torch.float32).to(self._group.device)
        every = self._group.all_gather(own, dim=0).cpu().numpy().tobytes()
        return [every[i : i + len(message)] for i in range(0, len(every), len(message))]
