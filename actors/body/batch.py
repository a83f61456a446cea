"""What a body computes in one step, and the one seam between engine and body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.attention import BLOCK_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tokens of one step, packed: T rows of S sequences, N of which are wanted.

    Row ``t`` is the token ``token_ids[t]`` at ``positions[t]`` of sequence ``row_sequence[t]``;
    its key and value go to ``slots[t]`` (block * 16 + offset). A sequence's rows are consecutive
    tokens, and sequences come in the order of their block tables. ``output_rows``, ascending, are
    the rows whose hidden state is wanted.

    ``drawn`` are the tokens of all rows where only the body's device knows them, below 0 where it
    does not either: such a row computes something. ``token_ids`` are anything then.
    """

    token_ids: npt.NDArray[np.int32]  # [T]
    positions: npt.NDArray[np.int32]  # [T]
    slots: npt.NDArray[np.int64]  # [T]
    row_sequence: npt.NDArray[np.int32]  # [T]
    block_tables: npt.NDArray[np.int32]  # [S, max_blocks]
    output_rows: npt.NDArray[np.int32]  # [N]
    drawn: torch.Tensor | None = None  # [T] int32


def whole_text(token_ids: Sequence[int], output_rows: npt.NDArray[np.int32]) -> Batch:
    """One sequence from its first token on, in the first blocks of an otherwise unused cache."""
    length = len(token_ids)
    places = np.arange(length, dtype=np.int32)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=places,
        slots=places.astype(np.int64),
        row_sequence=np.zeros(length, np.int32),
        block_tables=np.arange(-(-length // BLOCK_SIZE), dtype=np.int32)[None],
        output_rows=output_rows,
    )


@runtime_checkable
class BodyOfDevices(Protocol):
    """What a body on GPUs says besides."""

    @property
    def description(self) -> str:
        """What is in graphs and which attention there is, in words."""

    def memory(self) -> tuple[int, int]:
        """Bytes of its GPU, of several the one that has least left: those that are free, and
        all. Waits for it."""


class Body(Protocol):
    """A transformer without its output head, with its own paged KV cache.

    ``batch_invariant`` says that a row's bits depend on its own sequence only, whatever else is
    in the batch and however its prompt was cut (found out when the model was loaded).
    """

    hidden_size: int
    vocabulary_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    max_positions: int
    device: torch.device
    batch_invariant: bool
    name: str

    def allocate_cache(self, num_blocks: int) -> None:
        """Reserve ``num_blocks`` blocks of 16 tokens for every layer."""

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states ``[N, d] float32`` of ``output_rows`` after the final norm."""
