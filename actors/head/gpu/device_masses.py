"""What a shard on a device knows of the whole softmax: the estimates of its screen, on the host.

Estimates of the few rows that ask for a top-p set or an epsilon are copied to the host, where they
are outlined and bounded as those of `Shard` are; the canonical logits of the tokens that matter
come from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.head.owned_rows import OwnedRows
from actors.head.screens import one_row, postprocess_estimates
from actors.head.whole_softmax import (
    OutlinedRow,
    PartialMass,
    bound_mass,
    outline_mass,
)
from actors.states.flat_needs import flatten_adjustments, flatten_needs
from actors.states.need import Need
from kernels.penalties import adjust
from kernels.quantize import Tier
from kernels.screen import Screened
from kernels.search import Estimates, block_slack

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class DeviceMasses:
    """Bounds on the whole softmax of the rows ``owned``, by estimates of ``tier``.

    ``screen`` gives them for hidden states on the device, ``logits`` the raw canonical logits of
    one hidden state [1, d] and some rows; ``post`` are the head's bias, scale and softcap.
    """

    def __init__(
        self,
        tier: Tier,
        owned: OwnedRows,
        screen: Callable[[torch.Tensor], Screened],
        logits: Callable[[torch.Tensor, Ids], Float32s],
        post: tuple[Float32s | None, float, float | None],
    ) -> None:
        self._row_slack = tier.row_slack
        self._block_slack = block_slack(tier.row_slack)
        self._owned = owned
        self._screen = screen
        self._logits = logits
        self._post = post

    def outline(
        self, hidden: torch.Tensor, rows: Sequence[int], needs: Sequence[Need]
    ) -> dict[int, OutlinedRow]:
        """Of ``rows`` with hidden states [R, d] on the device, those that estimates say something
        about."""
        screened = self._screen(hidden)
        slack = _host(screened.hidden_slack)
        estimates = postprocess_estimates(
            Estimates(
                _host(screened.estimate),
                self._row_slack,
                np.concatenate([slack, np.zeros((len(slack), 1))], axis=1),
                self._block_slack,
            ),
            *self._post,
        )
        estimates = self._owned.locate(estimates)
        chosen = [needs[row] for row in rows]
        search = flatten_needs(chosen)
        adjustments = self._owned.of_rows(flatten_adjustments([need.adjustment for need in chosen]))
        known = np.isfinite(estimates.hidden_slack).all(axis=1)
        result = {}
        for place in np.flatnonzero(known).tolist():
            own = one_row(estimates, search, adjustments, place)
            result[rows[place]] = OutlinedRow(own, outline_mass(own, len(self._owned.ids)))
        return result

    def bound(self, hidden: torch.Tensor, outlined: OutlinedRow, lowest: int) -> PartialMass:
        """One row, ``hidden`` [1, d] on the device, with its tokens from bin ``lowest`` on known
        exactly."""
        own, outline = outlined
        assert outline is not None
        adjustments = own[2]

        def exact(ids: Ids) -> Float32s:
            raw = self._logits(hidden, ids) if len(ids) else np.empty(0, np.float32)
            if not adjustments.active.any():
                return raw
            return adjust(ids, raw, np.array([0, len(ids)], np.int64), adjustments)

        return bound_mass(own, self._owned, outline.count_from(lowest), exact)


def _host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
