"""Canonical logits of chosen tokens: the numbers that decide, after everything that estimates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.penalties import Adjustments, adjust
from lexshard.kernels.rows import as_array, canonical_logits, postprocess

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


class Rescorer:
    """The output weights [V, d] fp32 or bf16 with what the model does to its logits."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: npt.NDArray[np.float32] | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        self.size = weight.shape[0]
        self.row_bytes = weight.shape[1] * weight.element_size()
        self.bias = bias
        self.scale = scale
        self.softcap = softcap
        self.weight = as_array(weight)

    def raw(
        self,
        hidden: npt.NDArray[np.float32],
        ids: Ids,
        offsets: Offsets,
        dense: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """Canonical logits [total] of row ``n`` of ``hidden`` [N, d] and its own ``ids``.

        The rows in ``dense`` have every id and share one pass over the weights.
        """
        products = self._products(hidden, ids, offsets, dense)
        if self.bias is not None:
            products = postprocess(products, bias=self.bias[ids])
        return postprocess(products, scale=self.scale, softcap=self.softcap)

    def adjusted(
        self,
        hidden: npt.NDArray[np.float32],
        ids: Ids,
        offsets: Offsets,
        adjustments: Adjustments,
    ) -> npt.NDArray[np.float32]:
        """Canonical logits after the processors of each row."""
        raw = self.raw(hidden, ids, offsets)
        return adjust(ids, raw, offsets, adjustments) if adjustments.active.any() else raw

    def of_row(
        self, hidden: npt.NDArray[np.float32], adjustments: Adjustments, ids: Ids
    ) -> npt.NDArray[np.float32]:
        """The same of some ``ids`` of one row, ``hidden`` [1, d]."""
        return self.adjusted(hidden, ids, np.array([0, len(ids)], np.int64), adjustments)

    def _products(
        self,
        hidden: npt.NDArray[np.float32],
        ids: Ids,
        offsets: Offsets,
        dense: Sequence[int],
    ) -> npt.NDArray[np.float32]:
        if not len(dense):
            return canonical_logits(hidden, self.weight, ids, offsets)
        every = canonical_logits(hidden[list(dense)], self.weight)
        if len(dense) == len(hidden):
            return every.reshape(-1)
        result = np.empty(len(ids), np.float32)
        for index, row in enumerate(dense):
            result[offsets[row] : offsets[row + 1]] = every[index]
        others = np.setdiff1d(np.arange(len(hidden)), dense)
        own = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in others])
        own_offsets = np.cumsum([0, *np.diff(offsets)[others]])
        result[own] = canonical_logits(hidden[others], self.weight, ids[own], own_offsets)
        return result
