"""How dense rows lie in a slot of shared memory, as `DenseRows` has them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.decision import block_maxima

_ALIGNMENT = 64  # bytes of a cache line
_FLOAT = 4


def slot_bytes(vocabulary_size: int, rows: int) -> int:
    """How large a slot for ``rows`` dense rows must be."""
    return _maxima_start(vocabulary_size, rows) + blocks_of(vocabulary_size) * rows * _FLOAT


def dense_views(
    slot: npt.NDArray[np.uint8], vocabulary_size: int, rows: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Logits [rows, V] and maxima [rows, ceil(V / 64)]: views of ``slot``, C-contiguous."""
    logits = slot[: vocabulary_size * rows * _FLOAT].view(np.float32)
    maxima = slot[_maxima_start(vocabulary_size, rows) :].view(np.float32)
    blocks = blocks_of(vocabulary_size)
    return logits.reshape(rows, vocabulary_size), maxima[: blocks * rows].reshape(rows, blocks)


def write_dense(
    slot: npt.NDArray[np.uint8], logits: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Copies ``logits`` [rows, V] to ``slot``, with their maxima; the `dense_views` of what was
    written."""
    rows, size = logits.shape
    own_logits, own_maxima = dense_views(slot, size, rows)
    own_logits[:] = logits
    own_maxima[:] = block_maxima(own_logits)
    return own_logits, own_maxima


def _maxima_start(vocabulary_size: int, rows: int) -> int:
    end = vocabulary_size * rows * _FLOAT
    return -(-end // _ALIGNMENT) * _ALIGNMENT
