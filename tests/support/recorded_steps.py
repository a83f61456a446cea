"""Stands for a CUDA graph where there is no GPU: a tape of operators on fixed memory.

Recording notes every operator that torch calls, with its very tensors. A replay calls them again,
each result put where it was before: no Python of the model runs, nothing but the tape and the
memory decides what comes out, as with a graph. What a capture refuses, recording refuses: values
that the host reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lexshard.kernels.attention import reference
from tests.support.tiny_models import VOCABULARY

# What would wait for a device, and what a capture therefore refuses.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount")

# Three sequences and their blocks.
TABLES = ((5, 2), (7, 0), (3, 6))
TOKENS = tuple(
    tuple(int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length))
    for seed, length in enumerate((14, 7, 19))
)


def largest_difference(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))


class Tape(TorchDispatchMode):
    """Notes the operators that are called while it is entered.

    Raises RuntimeError for one that gives the host a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in WAITING:
            raise RuntimeError(f"the host waits for {func}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, result in self.calls:
                fresh = func(*args, **kwargs)
                for target, value in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                    if isinstance(target, torch.Tensor) and target.data_ptr() != value.data_ptr():
                        target.copy_(value)


class RecordingCapture:
    """A `actors.body.gpu.capture.Capture`; ``tapes`` are what it has recorded."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __call__(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        tape = Tape()
        with tape:
            result = compute()
        self.tapes.append(tape)
        return result, tape.replay


_CACHES = "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables"
_ROWS = "Tensor row_sequence, Tensor positions, float scale, int window, float softcap"

# `kernels.attention.write_cache` as an operator that a tape can hold.
write_cache = torch.library.custom_op(
    "lexshard_test::write_cache", reference.write_cache, mutates_args=("key_cache", "value_cache")
)


@torch.library.custom_op(
    "lexshard_test::paged_attention",
    mutates_args=("out",),
    schema=f"({_CACHES}, {_ROWS}, Tensor(a!) out) -> ()",
)
def _paged_attention(*arguments: Any) -> None:
    reference.paged_attention(*arguments)


def paged_attention(*arguments: Any) -> torch.Tensor:
    """`kernels.attention.paged_attention` likewise."""
    _paged_attention(*arguments)
    result: torch.Tensor = arguments[-1]
    return result
