"""What every head does with its output rows and its hidden states before and after the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# The integer masses of top-p (`kernels.truncate`) add up to less than 2**63 below this size.
LARGEST_VOCABULARY = 1 << 20
ROWS_AT_ONCE = 8192


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
