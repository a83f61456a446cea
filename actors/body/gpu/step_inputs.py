"""The integers of a step where the body computes: one copy brings them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch
from lexshard.kernels.attention import BLOCK_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A `Batch` as tensors of one device."""

    token_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int32, or int64 on the host
    row_sequence: torch.Tensor  # [T] int32
    output_rows: torch.Tensor  # [N] int32
    block_tables: torch.Tensor  # [S, max_blocks] int32


def on_the_host(batch: Batch) -> StepInputs:
    """The arrays of ``batch`` themselves."""
    arrays = {each: torch.from_numpy(getattr(batch, each)) for each in StepInputs.__slots__}
    if batch.drawn is not None:
        arrays["token_ids"] = batch.drawn.clamp(min=0)
    return StepInputs(**arrays)


def sent(batch: Batch, device: torch.device) -> StepInputs:
    """``batch`` on ``device``, by one copy that is not waited for."""
    rows, outputs = len(batch.token_ids), len(batch.output_rows)
    sequences, width = batch.block_tables.shape
    inputs = StaticInputs(rows, outputs, sequences, width, device)
    inputs.fill(batch, scratch_block=0)
    return inputs.tensors


class StaticInputs:
    """Memory on a device for the inputs of steps of up to ``rows`` rows, ``outputs`` of which are
    wanted, of up to ``sequences`` sequences with ``width`` blocks each.

    Steps with fewer are padded: rows of token 0 at position 0 of one more sequence, whose only
    block is the scratch block. They write the same key and value to the same slot, each attends
    itself alone, and what becomes of them is not read. Of tables that are wider, which planned
    attention does not read, the beginning is sent.
    """

    def __init__(
        self, rows: int, outputs: int, sequences: int, width: int, device: torch.device
    ) -> None:
        self._rows, self._width = rows, width
        self._lengths = [rows, rows, rows, rows, outputs, sequences * width]
        # One piece of memory, so that one copy fills it.
        self._words = torch.zeros(sum(self._lengths), dtype=torch.int32, device=device)
        parts = self._words.split(self._lengths)
        token_ids, positions, slots, row_sequence, output_rows, tables = parts
        self.tensors = StepInputs(
            token_ids,
            positions,
            slots,
            row_sequence,
            output_rows,
            tables.view(sequences, width),
        )

    def fill(self, batch: Batch, scratch_block: int) -> None:
        """Puts ``batch`` there, in the order of the current stream."""
        own = self.tensors
        count, width = len(batch.token_ids), min(batch.block_tables.shape[1], self._width)
        # The allocator of pinned memory keeps it until the copy is done.
        host = torch.empty(len(self._words), dtype=torch.int32, pin_memory=self._words.is_cuda)
        *rows, tables = (part.numpy() for part in host.split(self._lengths))
        sequences = own.block_tables.shape[0]
        token_ids, positions, slots, row_sequence, output_rows = rows
        _put(token_ids, batch.token_ids, 0)
        _put(positions, batch.positions, 0)
        _put(slots, batch.slots, scratch_block * BLOCK_SIZE)
        _put(row_sequence, batch.row_sequence, sequences - 1)
        _put(output_rows, batch.output_rows, 0)
        table = tables.reshape(sequences, self._width)
        used = len(batch.block_tables)
        table[:used, :width] = batch.block_tables[:, :width]
        table[:used, width:] = 0
        table[used:] = 0
        if count < self._rows:
            table[-1, 0] = scratch_block
        self._words.copy_(host, non_blocking=True)
        if batch.drawn is not None:
            own.token_ids[:count].copy_(batch.drawn.clamp(min=0))


def _put(target: Any, values: npt.NDArray[Any], padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding
