"""The whole softmax on a device: outlines of rows, and bounds on what is not known exactly.

The certificates of top-p and epsilon in three parts: `outline_rows` says where the tokens of rows
lie, from which a host plans (`kernels.mass.plan`); `bound_rows` computes the tokens from a planned
bin on exactly and bounds all others; and a host decides (`kernels.certify`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from lexshard.kernels.mass import Outline
from lexshard.kernels.mass.reference import BIN_WIDTH, BINS, LARGEST_PLACE, MASS_MARGIN
from lexshard.kernels.rows.triton_kernel import gather_logits
from lexshard.kernels.screen import Screened
from lexshard.kernels.search.gpu import triton_masses
from lexshard.kernels.search.gpu.search import (
    PostProcessing,
    Support,
    adjust_estimates,
    adjusted_factors,
    screened_rows,
)
from lexshard.kernels.search.gpu.triton_adjust import TILE
from lexshard.kernels.search.gpu.triton_bounds import EstimatedRows


class SoftmaxRows(NamedTuple):
    """R rows of a softmax over V tokens as a device knows them: adjusted estimates and errors."""

    hidden: torch.Tensor  # [R, d]
    screened: EstimatedRows
    factors: torch.Tensor  # [R, 3] fp32
    reals: torch.Tensor  # [R, 4] float64, as `Questions`
    tops: torch.Tensor  # [R, tiles] fp32, the best estimates
    tiles: int


class BoundedSoftmax(NamedTuple):
    """One row: some tokens exactly, bounds on the tempered mass of all others."""

    ids: npt.NDArray[np.int32]  # [K] sorted
    products: npt.NDArray[np.float32]  # [K] canonical, before post-processing and adjustment
    log_upper: float
    log_lower: float
    largest: float  # upper bound of any other adjusted logit


def softmax_rows(
    hidden: torch.Tensor,
    screened: Screened,
    post: PostProcessing,
    reals: torch.Tensor,
    support: Support,
    size: int,
) -> SoftmaxRows:
    """From estimates [R, >= V] of ``hidden`` [R, d], which are overwritten."""
    rows, tiles = len(hidden), triton.cdiv(size, TILE)
    estimates = screened_rows(screened, size)
    factors = adjusted_factors(hidden, estimates, post, reals)
    adjust_estimates(estimates, post, support)
    tops = torch.empty(rows, tiles, device=hidden.device)
    softmax = SoftmaxRows(hidden, estimates, factors, reals, tops, tiles)
    triton_masses.tops_kernel[(tiles, rows)](softmax)
    return softmax


def outline_rows(rows: SoftmaxRows) -> list[Outline | None]:
    """Where the tokens of every row lie; None where estimates do not tell. Waits for the device."""
    parts = [each.cpu().numpy() for each in launch_outlines(rows)]
    return [_outline(*each) for each in zip(*parts, strict=True)]


def launch_outlines(rows: SoftmaxRows) -> tuple[torch.Tensor, ...]:
    """What `outline_rows` reads, row by row: tokens and errors of bins, the largest error, the
    best estimate in bins, and whether estimates tell. Waits for nothing."""
    count, device = len(rows.hidden), rows.hidden.device
    counts = torch.zeros(count, BINS, dtype=torch.int32, device=device)
    errors = torch.zeros(count, BINS, dtype=torch.int64, device=device)
    widest = torch.zeros(count, dtype=torch.int64, device=device)
    width = triton.next_power_of_2(rows.tiles)
    triton_masses.outline_kernel[(rows.tiles, count)](
        rows, counts, errors, widest, TILES=width, enable_fp_fusion=False
    )
    best = rows.tops.max(dim=1).values.double() * rows.reals[:, 0] / BIN_WIDTH
    known = rows.factors.isfinite().all(dim=1) & (best.abs() < LARGEST_PLACE)
    return counts, errors, widest, best, known


def _outline(
    counts: npt.NDArray[np.int32],
    errors: npt.NDArray[np.int64],
    widest: np.int64,
    best: np.float64,
    known: np.bool_,
) -> Outline | None:
    if not known:
        return None
    last = int(np.flatnonzero(counts)[-1]) + 1
    units = triton_masses.ERROR_UNITS
    return Outline(
        int(np.floor(best)),
        counts[:last],
        (errors[:last] / units).astype(np.float32),
        float(widest / units / BIN_WIDTH),
    )


def bound_rows(
    rows: SoftmaxRows, weight: torch.Tensor, lowest: npt.NDArray[np.int64], room: int
) -> list[BoundedSoftmax]:
    """Every row with its tokens in bin ``lowest`` [R] or above exactly, at most ``room`` of them,
    and bounds on all others. ``weight`` [V, d] lies on the device, which is waited for."""
    bins = torch.from_numpy(lowest).to(weight.device)
    parts = [each.cpu().numpy() for each in launch_bounds(rows, weight, bins, max(room, 1))]
    return [_bounded(*each) for each in zip(*parts, strict=True)]


def launch_bounds(
    rows: SoftmaxRows, weight: torch.Tensor, bins: torch.Tensor, room: int
) -> tuple[torch.Tensor, ...]:
    """What `bound_rows` reads, row by row: the chosen tokens, their products, how many they are,
    both sums of bounds, the largest bound, and what the sums are relative to. Waits for nothing."""
    tiles, count, device = rows.tiles, len(rows.hidden), rows.hidden.device
    width = triton.next_power_of_2(tiles)
    tile_counts = torch.empty(count, tiles, dtype=torch.int32, device=device)
    sums = torch.empty(2, count, tiles, dtype=torch.float64, device=device)
    largest = torch.empty(count, tiles, device=device)
    triton_masses.bounds_kernel[(tiles, count)](
        rows, bins, tile_counts, *sums, largest, TILES=width, enable_fp_fusion=False
    )
    chosen = torch.zeros(count, room, dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    triton_masses.chosen_kernel[(tiles, count)](
        rows, bins, tile_counts, chosen, counts, room, TILES=width, enable_fp_fusion=False
    )
    products = torch.zeros(count, room, device=device)
    gather_logits(rows.hidden, weight, chosen, counts, products)
    best = rows.tops.max(dim=1).values.double() * rows.reals[:, 0]
    return chosen, products, counts, sums.sum(dim=2).T, largest.max(dim=1).values, best


def _bounded(
    chosen: npt.NDArray[np.int32],
    products: npt.NDArray[np.float32],
    count: np.int32,
    sums: npt.NDArray[np.float64],
    largest: np.float32,
    best: np.float64,
) -> BoundedSoftmax:
    with np.errstate(divide="ignore"):
        upper, lower = np.log(sums) + best
    return BoundedSoftmax(
        chosen[:count],
        products[:count],
        float(upper + MASS_MARGIN),
        float(lower - MASS_MARGIN),
        float(largest),
    )
