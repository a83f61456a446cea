"""The one random draw of the system: Gumbel noise that depends on (key, position, token id) alone.

Every path that samples (certified, dense, drafting, edge; any shard, any batch) reads its noise
here, so that the same seed gives the same token everywhere. `reference.py` states the mathematics.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise import cpu, reference

Implementation = Literal["reference", "cpu", "triton"]


def gumbel_noise(
    key: int,
    position: int,
    ids: Any,
    *,
    implementation: Implementation | None = None,
) -> Any:
    """Standard Gumbel noise of the given token ids, fp32, any order, repeats allowed.

    ``key`` is a 64-bit unsigned integer, ``position`` the index of the token being drawn in
    prompt + output, ``ids`` an integer array (numpy, or a torch tensor on a CUDA device, where
    the result stays on that device). Raises `ValueError` where key, position or an id is out of
    range (64 unsigned bits, 32 unsigned bits, not negative).
    """
    _check(key, position)
    chosen = implementation or ("triton" if getattr(ids, "is_cuda", False) else "cpu")
    if chosen == "triton":
        from lexshard.kernels.noise import triton_kernel

        return triton_kernel.gumbel_noise(key, position, ids)
    array = np.asarray(ids)
    if array.size and int(array.min()) < 0:
        raise ValueError("token ids must not be negative")
    module = reference if chosen == "reference" else cpu
    return module.gumbel_noise(key, position, array)


def gumbel_row(
    key: int,
    position: int,
    vocabulary_size: int,
    *,
    implementation: Implementation | None = None,
) -> npt.NDArray[np.float32]:
    """`gumbel_noise` of the ids 0 .. vocabulary_size - 1, one philox pass per block of 64."""
    _check(key, position)
    module = reference if implementation == "reference" else cpu
    return module.gumbel_row(key, position, vocabulary_size)


def _check(key: int, position: int) -> None:
    if not 0 <= key < 2**64:
        raise ValueError(f"key {key} is not a 64-bit unsigned integer")
    if not 0 <= position < 2**32:
        raise ValueError(f"position {position} is not a 32-bit unsigned integer")
