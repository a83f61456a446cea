"""How dense rows lie in a slot of shared memory, as `DenseRows` has them: one column each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import BLOCK

_ALIGNMENT = 64  # bytes of a cache line
_FLOAT = 4


def slot_bytes(vocabulary_size: int, columns: int) -> int:
    """How large a slot for ``columns`` dense rows must be."""
    return _maxima_start(vocabulary_size, columns) + _blocks(vocabulary_size) * columns * _FLOAT


def dense_views(
    slot: npt.NDArray[np.uint8], vocabulary_size: int, columns: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Logits [V, columns] and maxima [ceil(V / 64), columns]: views of ``slot``, C-contiguous."""
    logits = slot[: vocabulary_size * columns * _FLOAT].view(np.float32)
    maxima = slot[_maxima_start(vocabulary_size, columns) :].view(np.float32)
    blocks = _blocks(vocabulary_size)
    return (
        logits.reshape(vocabulary_size, columns),
        maxima[: blocks * columns].reshape(blocks, columns),
    )


def _blocks(vocabulary_size: int) -> int:
    return -(-vocabulary_size // BLOCK)


def _maxima_start(vocabulary_size: int, columns: int) -> int:
    end = vocabulary_size * columns * _FLOAT
    return -(-end // _ALIGNMENT) * _ALIGNMENT
