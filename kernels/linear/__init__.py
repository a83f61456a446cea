"""Linear layers whose result for a row does not depend on the rows beside it.

``torch.nn.functional.linear`` picks another order of summation for one row than for sixteen, so
the same token gets other bits in another batch. The row kernel here does not, needs no padding,
and reads bfloat16 checkpoints at half the bytes of float32 with the very same products. Where
activations may be rounded to bfloat16, too, processors that multiply pairs of it do twice the work
per instruction; others compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels import pool
from lexshard.kernels.linear import reference
from lexshard.kernels.linear.compact import compacted, expanded
from lexshard.kernels.linear.matrix import PAIRS
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.quantize.layout import aligned

Implementation = Literal["reference", "cpu"]
Arithmetic = Literal["float32", "bfloat16"]  # what activations are rounded to before products

# Below this many products a second thread costs more than it saves.
MULTIPLICATIONS_PER_THREAD = 2_000_000
SLICE = 1 << 22  # numbers of a weight that are looked at together


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight ``[outputs, depth]`` in panels of 16 outputs.

    ``panels [ceil(outputs / 16), depth, 16]`` is uint16 (bfloat16 bits) where every weight is
    exactly a bfloat16, else float32; or, where activations are rounded, too, ``[..., pairs,
    16]`` uint32: the weights of two neighbouring columns, the second in the upper half, and of a
    multiple of `PAIRS` of them; or, uint8, those in three quarters of their bytes
    (`kernels.linear.compact`). What is missing of the last panel or pair is zero. Panels begin
    with a line of memory: half of the reads of a vector would be two otherwise.
    """

    panels: npt.NDArray[Any]
    outputs: int
    depth: int

    @property
    def arithmetic(self) -> Arithmetic:
        return arithmetic_of(self.panels)

    @property
    def padded_outputs(self) -> int:
        return self.panels.shape[0] * PANEL


def arithmetic_of(panels: npt.NDArray[Any]) -> Arithmetic:
    """What is rounded before it is multiplied with these panels."""
    return "bfloat16" if panels.dtype in (np.uint32, np.uint8) else "float32"


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every float32 value is exactly a bfloat16 (its lower 16 bits are zero)."""
    if weight.dtype == torch.bfloat16:
        return True
    for part in row_slices(weight):
        if (part.float().contiguous().view(torch.int32) & 0xFFFF).any():
            return False
    return True


def row_slices(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The weight in slices of rows, of which a copy takes little room."""
    return weight.split(max(1, SLICE * len(weight) // max(1, weight.numel())))


def pack(
    weight: torch.Tensor,
    *,
    half: bool | None = None,
    arithmetic: Arithmetic = "float32",
    compact: bool = False,
) -> PackedWeight:
    """Pack ``weight [N, K]``; ``half`` forces the storage (None: bfloat16 where it is exact).

    With ``arithmetic`` bfloat16 a weight that is stored so is multiplied with activations that are
    rounded to it, and those of its values that are below its normal numbers are zero; ``compact``
    stores it in fewer bytes where that can be. Raises ValueError where ``half`` is asked for and
    would lose bits.
    """
    outputs, depth = weight.shape
    exact = fits_bfloat16(weight)
    if half and not exact:
        raise ValueError(
            "this weight has float32 values that bfloat16 cannot hold; pack it with half=False"
        )
    half = exact if half is None else half
    values = _bits(weight.detach().contiguous(), half)
    if half and arithmetic == "bfloat16":
        values = _pairs(values)
    whole, rest = divmod(outputs, PANEL)
    columns = values.shape[1]
    panels = aligned((-(-outputs // PANEL), columns, PANEL), values.dtype)
    panels[:whole] = values[: whole * PANEL].reshape(whole, PANEL, columns).transpose(0, 2, 1)
    if rest:
        panels[whole, :, :rest] = values[whole * PANEL :].T
    if panels.dtype == np.uint32 and half and compact:
        panels = smaller if (smaller := compacted(panels)) is not None else panels
    return PackedWeight(panels if half else panels.view(np.float32), outputs, depth)


def _bits(weight: torch.Tensor, half: bool) -> npt.NDArray[Any]:
    """What is stored of each weight: uint16 (a bfloat16) or uint32 (a float32)."""
    if half and weight.dtype == torch.bfloat16:
        return weight.view(torch.int16).numpy().view(np.uint16)
    values = weight.float().numpy().view(np.uint32)
    return (values >> 16).astype(np.uint16) if half else values


def _pairs(values: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Neighbouring columns of ``values [N, K]`` in a word each, the second in the upper half."""
    normal = np.where(values & 0x7F80, values, values & 0x8000)
    even = np.pad(normal, ((0, 0), (0, -values.shape[1] % (2 * PAIRS))))
    return np.ascontiguousarray(even).view("<u4")


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight ``[N, K]`` in float32, bit for bit."""
    panels = packed.panels
    if panels.dtype == np.uint8:
        panels = expanded(panels, -(-packed.depth // (2 * PAIRS)) * PAIRS)
    bits = panels.astype(np.uint32) << 16 if panels.dtype == np.uint16 else panels.view(np.uint32)
    if packed.arithmetic == "bfloat16":
        halves = np.stack([bits << 16, bits & 0xFFFF0000], axis=2)  # [P, K / 2, 2, 16]
        bits = halves.reshape(len(panels), -1, PANEL)[:, : packed.depth]
    rows = np.ascontiguousarray(bits.transpose(0, 2, 1)).reshape(-1, packed.depth)
    return torch.from_numpy(rows[: packed.outputs].view(np.float32))


def linear(
    x: torch.Tensor, weight: PackedWeight, *, implementation: Implementation = "cpu"
) -> torch.Tensor:
    """``x [T, K] float32`` times the packed weight, transposed: ``[T, N] float32``.

    On the CPU row ``t`` of the result is a function of row ``t`` of ``x`` alone, bit for bit.
    """
    if implementation == "reference":
        if weight.arithmetic == "bfloat16":
            x = reference.rounded(x)
        return reference.linear(x, unpack(weight))
    from lexshard.kernels.linear import cpu  # numba compiles on first use; keep the import cheap

    out = np.empty((x.shape[0], weight.padded_outputs), dtype=np.float32)
    panels = weight.panels
    large = x.shape[0] * panels.size > MULTIPLICATIONS_PER_THREAD
    cpu.multiply_in_team(*pool.team(worth=large), x.contiguous().numpy(), panels, out)
    result = torch.from_numpy(out)
    if weight.padded_outputs != weight.outputs:
        result = result[:, : weight.outputs].contiguous()
    return result
