"""Early refusals of what verification cannot use, and what to do about them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.verify.types import DenseProposals, DraftedRows, Proposals, SparseProposals

# How far the probabilities of a sparse proposal may be from adding up to 1.
MASS_TOLERANCE = 1e-5


def check_rows(logits: Any, rows: DraftedRows) -> None:
    """Written for speed: a few arrays of one or two values, before kernels that take 100 us."""
    _check_logits("logits", logits)
    offsets = rows.offsets
    sequences = len(offsets) - 1
    counts = offsets[1:] - offsets[:-1]
    if sequences < 0 or offsets[0] != 0 or (sequences and counts.min() < 1):
        raise ValueError("offsets begin with 0 and every sequence has at least one row")
    if offsets[-1] != logits.shape[0]:
        raise ValueError(f"offsets end at {offsets[-1]} but there are {logits.shape[0]} rows")
    drafts = logits.shape[0] - sequences * rows.bonus
    if tuple(rows.drafts.shape) != (drafts,):
        raise ValueError(
            f"{logits.shape[0]} rows of {sequences} sequences have "
            f"{drafts} drafts, got {tuple(rows.drafts.shape)}"
        )
    for name in ("inverse_temperature", "key", "position"):
        if getattr(rows, name).shape != (sequences,):
            raise ValueError(f"{name} needs one value for each of the {sequences} sequences")
    if not sequences:
        return
    scale = rows.inverse_temperature
    if not (scale.min() >= 0 and scale.max() < math.inf):
        raise ValueError("inverse temperatures are finite and not negative; 0 is greedy")
    if (rows.position + counts.astype(np.uint64)).max() > 2**32:
        raise ValueError("a position does not fit 32 bits")
    if drafts and isinstance(rows.drafts, np.ndarray):
        lowest, highest = rows.drafts.min(), rows.drafts.max()
        if lowest < 0 or highest >= logits.shape[1]:
            raise ValueError(
                f"drafts from {lowest} to {highest} do not fit a vocabulary of {logits.shape[1]}; "
                "cut a sequence's drafts before the first such token"
            )


def refuse_no_bonus(rows: DraftedRows) -> None:
    """For kernels that count on a row after each sequence's drafts."""
    if not rows.bonus:
        raise ValueError("on a device every sequence has a row after its drafts: give it, too")


def _check_logits(name: str, logits: Any) -> None:
    on_host = isinstance(logits, np.ndarray)
    single = logits.dtype == np.float32 if on_host else str(logits.dtype) == "torch.float32"
    if logits.ndim != 2 or not single:
        raise ValueError(f"{name} [rows, V] in float32 expected; convert them first")
    if not (logits.flags.c_contiguous if on_host else logits.is_contiguous()):
        raise ValueError(f"{name} are rows side by side in memory; make them contiguous")


def check_proposals(logits: Any, rows: DraftedRows, proposals: Proposals) -> None:
    if proposals is None:
        return
    drafts = rows.drafts.shape[0]
    if isinstance(proposals, DenseProposals):
        _check_logits("logits of the proposals", proposals.logits)
        if tuple(proposals.logits.shape) != (drafts, logits.shape[1]):
            raise ValueError(
                f"proposals of shape {(drafts, logits.shape[1])} expected, "
                f"got {tuple(proposals.logits.shape)}"
            )
        scale = proposals.inverse_temperature
        if scale.shape != rows.inverse_temperature.shape:
            raise ValueError("proposals need one inverse temperature for each sequence")
        wrong = (scale <= 0) & (rows.inverse_temperature > 0)
        if len(scale) and (wrong.any() or not abs(scale).max() < math.inf):
            raise ValueError(
                "dense proposals need a temperature above 0; a greedy drafter is certain of its "
                "drafts: verify them without proposals, or with sparse ones of probability 1"
            )
        return
    _check_sparse(logits.shape[1], rows, proposals)


def _check_sparse(size: int, rows: DraftedRows, proposals: SparseProposals) -> None:
    ids, probabilities, offsets = proposals.ids, proposals.probabilities, proposals.offsets
    drafts = rows.drafts.shape[0]
    if offsets.shape != (drafts + 1,) or offsets[0] != 0 or np.any(np.diff(offsets) < 1):
        raise ValueError(f"{drafts} sparse proposals of at least one token expected")
    if ids.shape != probabilities.shape or ids.shape != (int(offsets[-1]),):
        raise ValueError("ids and probabilities of sparse proposals end where the offsets do")
    if probabilities.dtype != np.float64 or ids.dtype != np.int32:
        raise ValueError("sparse proposals are int32 ids and float64 probabilities")
    if not drafts:
        return
    owners = np.repeat(np.arange(drafts), np.diff(offsets))
    places = owners.astype(np.int64) * size + ids
    if ids.min() < 0 or ids.max() >= size or np.any(np.diff(places) <= 0):
        raise ValueError("ids of a sparse proposal are sorted, distinct and in the vocabulary")
    masses = np.add.reduceat(probabilities, offsets[:-1])
    if not np.all(probabilities >= 0) or np.any(np.abs(masses - 1) > MASS_TOLERANCE):
        raise ValueError("probabilities of a sparse proposal add up to 1; normalise them")
    if isinstance(rows.drafts, np.ndarray):
        _check_drafts_are_proposed(places, probabilities, np.arange(drafts) * size + rows.drafts)


def _check_drafts_are_proposed(
    places: npt.NDArray[np.int64],
    probabilities: npt.NDArray[np.float64],
    wanted: npt.NDArray[np.int64],
) -> None:
    found = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
    absent = (places[found] != wanted) | (probabilities[found] == 0)
    if absent.any():
        raise ValueError(
            f"draft {int(np.argmax(absent))} has no probability in its sparse proposal; pass the "
            "distribution it was drawn from"
        )
