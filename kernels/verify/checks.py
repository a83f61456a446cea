"""Early refusals of what verification cannot use, and what to do about them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.verify.types import (
    DenseProposals,
    DraftedRows,
    Limits,
    Proposals,
)


def check(
    logits: npt.NDArray[np.float32], rows: DraftedRows, proposals: Proposals, sigmoid: Limits | None
) -> None:
    """Raises ValueError."""
    _check_logits("logits", logits)
    count, size = logits.shape
    if any(each.shape != (count,) for each in rows):
        raise ValueError(f"{count} rows need one draft, temperature, key and position each")
    if not count:
        return
    _check_scales(rows.inverse_temperature)
    if rows.position.max() >= 2**32:
        raise ValueError("a position does not fit 32 bits")
    if rows.drafts.min() < 0 or rows.drafts.max() >= size:
        raise ValueError(f"drafts do not fit a vocabulary of {size}: leave those rows out")
    if sigmoid is not None:
        alpha, beta = sigmoid
        if not (-math.inf < alpha < 0 < beta < math.inf):
            raise ValueError(f"alpha {alpha} must be below 0 and beta {beta} above, both finite")
        if not isinstance(proposals, DenseProposals):
            raise ValueError("sigmoids need the drafter's logits: pass dense proposals")
    if isinstance(proposals, DenseProposals):
        _check_logits("logits of the proposals", proposals.logits)
        if proposals.logits.shape != (count, size):
            raise ValueError(f"a row of {size} proposed logits expected for each of {count} drafts")
        if proposals.inverse_temperature.shape != (count,):
            raise ValueError("proposals need one inverse temperature for each row")
        _check_scales(proposals.inverse_temperature)


def _check_logits(name: str, logits: npt.NDArray[np.float32]) -> None:
    if logits.ndim != 2 or logits.dtype != np.float32:
        raise ValueError(f"{name} [rows, V] in float32 expected; convert them first")
    if not logits.flags.c_contiguous:
        raise ValueError(f"{name} are rows side by side in memory; make them contiguous")


def _check_scales(scale: npt.NDArray[np.float64]) -> None:
    if not (scale.min() > 0 and scale.max() < math.inf):
        raise ValueError(
            "inverse temperatures are finite and above 0; a greedy row stands where its best token "
            "is the draft, and a greedy drafter is certain: leave its proposals out"
        )
