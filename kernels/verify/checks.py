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
    SparseProposals,
)

# How far the probabilities of a sparse proposal may be from adding up to 1.
MASS_TOLERANCE = 1e-5


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
    elif proposals is not None:
        _check_sparse(size, rows.drafts, proposals)


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


def _check_sparse(size: int, drafts: npt.NDArray[np.int64], proposals: SparseProposals) -> None:
    ids, probabilities, offsets = proposals.ids, proposals.probabilities, proposals.offsets
    count = len(drafts)
    if offsets.shape != (count + 1,) or offsets[0] != 0 or np.any(np.diff(offsets) < 1):
        raise ValueError(f"{count} sparse proposals of at least one token expected")
    if ids.shape != probabilities.shape or ids.shape != (int(offsets[-1]),):
        raise ValueError("ids and probabilities of sparse proposals end where the offsets do")
    if probabilities.dtype != np.float64 or ids.dtype != np.int32:
        raise ValueError("sparse proposals are int32 ids and float64 probabilities")
    places = np.repeat(np.arange(count), np.diff(offsets)) * size + ids
    if ids.min() < 0 or ids.max() >= size or np.any(np.diff(places) <= 0):
        raise ValueError("ids of a sparse proposal are sorted, distinct and in the vocabulary")
    masses = np.add.reduceat(probabilities, offsets[:-1])
    if not np.all(probabilities >= 0) or np.any(np.abs(masses - 1) > MASS_TOLERANCE):
        raise ValueError("probabilities of a sparse proposal add up to 1; normalise them")
    wanted = np.arange(count) * size + drafts
    found = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
    absent = (places[found] != wanted) | (probabilities[found] == 0)
    if absent.any():
        raise ValueError(
            f"draft {int(np.argmax(absent))} has no probability in its sparse proposal; pass the "
            "distribution it was drawn from"
        )
