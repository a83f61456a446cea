"""What every head does with its output rows and its hidden states before and after the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.states.row_table import RowTable

# The integer masses of top-p (`kernels.truncate`) add up to less than 2**63 below this size.
LARGEST_VOCABULARY = 1 << 20
ROWS_AT_ONCE = 8192
# Rows whose masks hold at most this share of the vocabulary compute these tokens unscreened.
FEW_ALLOWED_SHARE = 1 / 64


class NonFiniteHiddenError(ValueError):
    """A hidden state contains NaN or infinity, so no token can be drawn from it."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"hidden states of rows {list(self.rows)} contain NaN or infinity: the model body "
            "overflowed or its weights are damaged"
        )


def refuse_unsound(sound: npt.NDArray[np.bool_]) -> None:
    """Raises `NonFiniteHiddenError` naming the rows where ``sound`` [N] is False."""
    if not sound.all():
        raise NonFiniteHiddenError(np.flatnonzero(~sound).tolist())


def computes_allowed(rows: RowTable, row: int, vocabulary_size: int) -> bool:
    """Whether a row has a mask of so few tokens that each is computed: no screen is of use there.
    Where labels are asked for, each is wanted."""
    adjustment = rows.adjustments[row]
    if adjustment is None or adjustment.mask is None:
        return False
    kind = rows.kinds[row]
    few = adjustment.mask.count <= FEW_ALLOWED_SHARE * vocabulary_size
    return kind == "labels" or (few and kind != "dense")


def few_allowed(rows: RowTable, owned: OwnedRows) -> dict[int, npt.NDArray[np.int32]]:
    """By row, the tokens of those rows that compute each that they are allowed, as a shard numbers
    what it has ``owned``."""
    if not len(rows.flat.masks):
        return {}
    masked: dict[int, npt.NDArray[np.int32]] = {}
    for row in np.flatnonzero(rows.flat.mask >= 0).tolist():
        if computes_allowed(rows, row, owned.vocabulary_size):
            adjustment = rows.adjustments[row]
            assert adjustment is not None
            assert adjustment.mask is not None
            masked[row] = owned.among(adjustment.mask.ids)
    return masked


def own_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, vocabulary_size: int
) -> tuple[torch.Tensor, npt.NDArray[np.float32] | None]:
    """The first ``vocabulary_size`` of ``weight`` [V, d], where it is, and of ``bias`` [V].

    Raises `ValueError` where sizes do not fit or values are not finite.
    """
    if not 0 < vocabulary_size <= weight.shape[0]:
        raise ValueError(
            f"vocabulary size {vocabulary_size} does not fit {weight.shape[0]} output rows"
        )
    if vocabulary_size >= LARGEST_VOCABULARY:
        raise ValueError(f"vocabularies have fewer than {LARGEST_VOCABULARY} tokens")
    rows = weight.detach()[:vocabulary_size].contiguous()
    finite = all(bool(torch.isfinite(part).all()) for part in rows.split(ROWS_AT_ONCE))
    biases: npt.NDArray[np.float32] | None = None
    if bias is not None:
        biases = bias.detach()[:vocabulary_size].float().cpu().contiguous().numpy()
        finite = finite and bool(np.isfinite(biases).all())
    if not finite:
        raise ValueError("the output weights or biases contain NaN or infinity")
    return rows, biases
