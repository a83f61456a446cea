"""Linear layers whose result for a row does not depend on the rows beside it.

``torch.nn.functional.linear`` picks another order of summation for one row than for sixteen, so
the same token gets other bits in another batch. The row kernel here does not, needs no padding,
and reads bfloat16 checkpoints at half the bytes of float32 with the very same products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels import pool
from lexshard.kernels.linear import reference
from lexshard.kernels.linear.tile import PANEL

Implementation = Literal["reference", "cpu"]

# Below this many products a second thread costs more than it saves.
MULTIPLICATIONS_PER_THREAD = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight ``[outputs, depth]`` in panels of 16 outputs.

    ``panels [ceil(outputs / 16), depth, 16]`` is uint16 (bfloat16 bits) where every weight is
    exactly a bfloat16, else float32; missing outputs of the last panel are zero.
    """

    panels: npt.NDArray[Any]
    outputs: int
    depth: int

    @property
    def padded_outputs(self) -> int:
        return self.panels.shape[0] * PANEL


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every float32 value is exactly a bfloat16 (its lower 16 bits are zero)."""
    if weight.dtype == torch.bfloat16:
        return True
    return bool((weight.float().contiguous().view(torch.int32) & 0xFFFF).eq(0).all())


def pack(weight: torch.Tensor, *, half: bool | None = None) -> PackedWeight:
    """Pack ``weight [N, K]``; ``half`` forces the storage (None: bfloat16 where it is exact).

    Raises ValueError where ``half`` is asked for and would lose bits.
    """
    outputs, depth = weight.shape
    exact = fits_bfloat16(weight)
    if half and not exact:
        raise ValueError(
            "this weight has float32 values that bfloat16 cannot hold; pack it with half=False"
        )
    half = exact if half is None else half
    values = _bits(weight.detach().contiguous(), half)
    whole, rest = divmod(outputs, PANEL)
    panels = np.zeros((-(-outputs // PANEL), depth, PANEL), dtype=values.dtype)
    panels[:whole] = values[: whole * PANEL].reshape(whole, PANEL, depth).transpose(0, 2, 1)
    if rest:
        panels[whole, :, :rest] = values[whole * PANEL :].T
    return PackedWeight(panels if half else panels.view(np.float32), outputs, depth)


def _bits(weight: torch.Tensor, half: bool) -> npt.NDArray[Any]:
    """What is stored of each weight: uint16 (a bfloat16) or uint32 (a float32)."""
    if half and weight.dtype == torch.bfloat16:
        return weight.view(torch.int16).numpy().view(np.uint16)
    values = weight.float().numpy().view(np.uint32)
    return (values >> 16).astype(np.uint16) if half else values


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight ``[N, K]`` in float32, bit for bit."""
    panels = packed.panels
    bits = panels.astype(np.uint32) << 16 if panels.dtype == np.uint16 else panels.view(np.uint32)
    rows = np.ascontiguousarray(bits.transpose(0, 2, 1)).reshape(-1, packed.depth)
    return torch.from_numpy(rows[: packed.outputs].view(np.float32))


def linear(
    x: torch.Tensor, weight: PackedWeight, *, implementation: Implementation = "cpu"
) -> torch.Tensor:
    """``x [T, K] float32`` times the packed weight, transposed: ``[T, N] float32``.

    On the CPU row ``t`` of the result is a function of row ``t`` of ``x`` alone, bit for bit.
    """
    if implementation == "reference":
        return reference.linear(x, unpack(weight))
    from lexshard.kernels.linear import cpu  # numba compiles on first use; keep the import cheap

    out = np.empty((x.shape[0], weight.padded_outputs), dtype=np.float32)
    rows, panels = x.contiguous().numpy(), weight.panels
    large = x.shape[0] * panels.size > MULTIPLICATIONS_PER_THREAD
    cuts = [panels.shape[0] * i // pool.threads() for i in range(pool.threads() + 1)]
    if not large:
        cuts = [0, panels.shape[0]]
    pool.run(
        [
            partial(cpu.multiply_panels, rows, panels, out, False, first, last)
            for first, last in pairwise(cuts)
        ]
    )
    result = torch.from_numpy(out)
    if weight.padded_outputs != weight.outputs:
        result = result[:, : weight.outputs].contiguous()
    return result
