"""Top-p of whole rows where their logits are: the very tokens of the CPU, since masses are its
integers (`kernels.truncate.triton_kernel`) and torch adds and sorts integers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lexshard.kernels.truncate.triton_kernel import row_masses


class Nuclei(NamedTuple):
    """The tokens that top-p leaves of N rows, best first; those behind ``counts`` mean nothing."""

    ids: torch.Tensor  # [N, K] int64
    counts: torch.Tensor  # [N] int64, above K where there was no room for all


def nuclei(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, top_p: torch.Tensor, room: int
) -> Nuclei:
    """What `kernels.truncate.truncate` leaves of ``logits`` [N, V] fp32 by ``top_p`` alone.

    ``inverse_temperature`` [N] float64, above 0, holds fp32 values, ``top_p`` [N] is float64; all
    lie on one device. K is ``room``, or V where that is less. Nothing waits for the device.
    """
    size = logits.shape[1]
    masses, totals, keys = row_masses(logits, inverse_temperature)
    target = torch.minimum((top_p * totals.double()).ceil().long().clamp_(min=1), totals)
    ids = size - 1 - (keys.topk(min(room, size), dim=1).values & 0xFFFFFFFF)
    sums = masses.gather(1, ids).cumsum(dim=1)
    counts = (sums < target[:, None]).sum(dim=1) + 1
    return Nuclei(ids, counts)
