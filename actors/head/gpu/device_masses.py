"""What a shard on a device knows of the whole softmax, found there.

For the rows that ask for a top-p set or an epsilon the device outlines its estimates, computes the
tokens that a plan wants exactly and bounds all others (`kernels.search.gpu.masses`); what travels
is a few hundred bins a row, and then the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.head.gpu.device_step import PackedStep
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.whole_softmax import PartialMass
from lexshard.kernels.mass import Outline
from lexshard.kernels.penalties import Adjustments, adjust
from lexshard.kernels.screen import Screened
from lexshard.kernels.search.gpu.masses import SoftmaxRows, bound_rows, outline_rows, softmax_rows
from lexshard.kernels.search.gpu.search import PostProcessing, Support

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
NO_BIN = np.iinfo(np.int64).max  # in which and above which nothing lies


@dataclass(frozen=True, slots=True, eq=False)
class OutlinedRows:
    """The ``rows`` of a step on the device, and where their tokens lie."""

    rows: tuple[int, ...]
    softmax: SoftmaxRows
    outlines: tuple[Outline | None, ...]
    adjustments: Adjustments


class DeviceMasses:
    """Bounds on the whole softmax of the rows ``owned``, whose weights are ``weight`` [V, d].

    ``screen`` estimates hidden states on the device, ``post`` is what is done to estimates there,
    and ``finish`` to the canonical products of some rows on the host.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        owned: OwnedRows,
        screen: Callable[[torch.Tensor], Screened],
        post: PostProcessing,
        finish: Callable[[Ids, Float32s], Float32s],
    ) -> None:
        self._weight = weight
        self._owned = owned
        self._screen = screen
        self._post = post
        self._finish = finish

    def outline(
        self,
        hidden: torch.Tensor,
        rows: Sequence[int],
        packed: PackedStep,
        adjustments: Adjustments,
    ) -> OutlinedRows:
        """The ``rows`` with hidden states [R, d] fp32 on the device, which ask what is ``packed``.
        Waits for the device."""
        entries = packed.support.entries
        if not len(entries):
            entries = np.zeros((1, entries.shape[1]), np.int32)
        support = Support(self._sent(packed.support.offsets), self._sent(entries))
        softmax = softmax_rows(
            hidden.contiguous(),
            self._screen(hidden),
            self._post,
            self._sent(packed.reals),
            support,
            len(self._owned.ids),
        )
        return OutlinedRows(tuple(rows), softmax, tuple(outline_rows(softmax)), adjustments)

    def bound(self, outlined: OutlinedRows, lowest: Mapping[int, int]) -> list[PartialMass]:
        """The rows of ``lowest``, each with its tokens from such a bin on known exactly. Waits for
        the device."""
        size = len(self._owned.ids)
        bins = np.array([lowest.get(row, NO_BIN) for row in outlined.rows], np.int64)
        room = max(
            outline.count_from(lowest[row])
            for row, outline in zip(outlined.rows, outlined.outlines, strict=True)
            if row in lowest and outline is not None
        )
        bounded = bound_rows(outlined.softmax, self._weight, bins, room)
        ids = np.concatenate([each.ids for each in bounded])
        raw = self._finish(ids, np.concatenate([each.products for each in bounded]))
        offsets = np.cumsum([0, *(len(each.ids) for each in bounded)], dtype=np.int64)
        logits = adjust(ids, raw, offsets, outlined.adjustments)
        parts = {
            row: PartialMass(
                self._owned.tokens(each.ids),
                logits[first:last],
                each.log_upper,
                each.log_lower,
                each.largest,
                size - len(each.ids),
            )
            for row, each, first, last in zip(
                outlined.rows, bounded, offsets[:-1], offsets[1:], strict=True
            )
        }
        return [parts[row] for row in lowest]

    def _sent(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._weight.device)
