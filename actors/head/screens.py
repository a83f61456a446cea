"""What a head screens with: every estimate comes with a bound on its error.

A screen turns hidden states into approximate logits of all rows. The dense one multiplies the
weights themselves in fp32; the others read a low-precision copy of them (`kernels.quantize`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.head.softmax.whole_softmax import SoftmaxRow
from lexshard.kernels.certified import DenseSlack
from lexshard.kernels.ordered_sums import norms
from lexshard.kernels.penalties import Adjustments, select_row
from lexshard.kernels.quantize import Int4Tier, Tier
from lexshard.kernels.rounding import LARGEST_BOUND, SMALLEST_PRODUCT, UNIT_ROUNDOFF
from lexshard.kernels.screen import refine, screen
from lexshard.kernels.search import Estimates, Leaders, Needs, block_slack

DENSE = "dense-fp32"
Linear = Callable[[torch.Tensor], torch.Tensor]
Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


class Screen(Protocol):
    """Approximate products of hidden states with all output rows."""

    name: str
    bytes_per_pass: int
    failure_probability: float  # per row of the vocabulary; 0 where the bound always holds

    def __call__(self, hidden: npt.NDArray[np.float32]) -> Estimates:
        """Estimates of ``<W_i, h_n>`` for ``hidden`` [N, d] fp32, finite.

        ``hidden_slack`` has an infinite entry where an estimate means nothing.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ScreenedRows:
    """What one screen knows about the rows it served: estimates of the raw logits of ``rows``, and
    what is searched for in them."""

    rows: npt.NDArray[np.int64]  # [S]
    screen: Screen
    estimates: Estimates  # [S, V]
    search: Needs  # S rows
    adjustments: Adjustments  # S rows
    known: npt.NDArray[np.bool_]  # [S] whether the estimates mean anything
    leaders: Leaders

    def one_row(self, place: int) -> SoftmaxRow:
        """The same of the row at ``place`` alone."""
        one, estimates = slice(place, place + 1), self.estimates
        return (
            estimates._replace(
                values=estimates.values[one], hidden_slack=estimates.hidden_slack[one]
            ),
            self.search._replace(**{n: f[one] for n, f in self.search._asdict().items()}),
            select_row(self.adjustments, place),
        )


class DenseScreen:
    """fp32 products with the weights; ``linear`` adds up fp32 products in any order.

    An fp32 sum of ``d`` products errs by at most ``gamma_d = d u / (1 - d u)`` of
    ``||W_i|| ||h||`` (``u`` = 2**-24), the canonical rounding by ``u``.
    """

    name = DENSE
    failure_probability = 0.0

    def __init__(self, weight: torch.Tensor, linear: Linear | None) -> None:
        if linear is None:
            linear = functools.partial(torch.nn.functional.linear, weight=weight.float())
        self._linear = linear
        lengths = row_norms(weight)
        row_slack = np.stack([np.zeros_like(lengths), lengths])
        depth = weight.shape[1] * UNIT_ROUNDOFF
        relative_error = (depth / (1.0 - depth) + 2 * UNIT_ROUNDOFF) * (1.0 + 1e-6)
        limits = np.array([relative_error, float(lengths.max(initial=0.0))])
        self.slack = DenseSlack(row_slack, block_slack(row_slack), limits)
        self.bytes_per_pass = weight.numel() * weight.element_size()

    def __call__(self, hidden: npt.NDArray[np.float32]) -> Estimates:
        with torch.inference_mode():
            values = self._linear(torch.from_numpy(hidden)).contiguous().numpy()
        lengths = hidden_norms(hidden)
        slack = np.zeros((len(hidden), 3))
        relative_error, largest = self.slack.limits
        slack[:, 1] = relative_error * lengths
        slack[:, 2] = SMALLEST_PRODUCT
        overflow = ~(lengths * largest < LARGEST_BOUND)
        if overflow.any():
            values = values.copy()
            values[overflow] = 0.0
            slack[overflow, 2] = np.inf
        return Estimates(values, self.slack.rows, slack, self.slack.blocks)


class TierScreen:
    """The integer products of a low-precision tier."""

    def __init__(self, name: str, tier: Tier) -> None:
        self.name = name
        self._tier = tier
        self.failure_probability = float(getattr(tier, "failure_probability", 0.0))
        self.bytes_per_pass = tier_bytes(tier)
        self.block_slack = block_slack(tier.row_slack)

    def __call__(self, hidden: npt.NDArray[np.float32]) -> Estimates:
        screened = screen(hidden, self._tier)
        slack = _three(screened.hidden_slack)
        return Estimates(screened.estimate, screened.row_slack, slack, self.block_slack)


class FineRows:
    """Better estimates of a few rows from both planes of an int4 tier."""

    def __init__(self, tier: Int4Tier) -> None:
        self._tier = tier
        self.bytes_per_row = 2 * tier.high.shape[1]
        self._block_slack = block_slack(tier.fine_row_slack)

    def __call__(self, hidden: npt.NDArray[np.float32], ids: Ids, offsets: Offsets) -> Estimates:
        """Estimates [total] for row ``n`` of ``hidden`` and ``ids[offsets[n]:offsets[n + 1]]``."""
        refined = refine(hidden, self._tier, ids, offsets)
        slack = _three(refined.hidden_slack)
        return Estimates(refined.estimate, refined.row_slack, slack, self._block_slack)


def _three(hidden_slack: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Room for the part of the slack that is the same for every row."""
    return np.concatenate([hidden_slack, np.zeros((len(hidden_slack), 1))], axis=1)


def hidden_norms(hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """``||h_n||`` [N] in float64."""
    return norms(np.ascontiguousarray(hidden))


def row_norms(weight: torch.Tensor) -> npt.NDArray[np.float32]:
    """``||W_i||`` [V], rounded up."""
    norms = [rows.double().square().sum(dim=1).sqrt() for rows in weight.split(8192)]
    wide = torch.cat(norms).numpy() * (1.0 + 1e-12)
    with np.errstate(over="ignore"):
        near = wide.astype(np.float32)
        return np.where(near < wide, np.nextafter(near, np.float32(np.inf)), near)


def tier_bytes(tier: Tier) -> int:
    """What one pass of a screen over ``tier`` reads, slacks included."""
    names = {"low", "fine_row_slack"}  # of an int4 tier these are for the few that remain
    arrays = [getattr(tier, name) for name in tier.__slots__ if name not in names]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def postprocess_estimates(
    estimates: Estimates,
    bias: npt.NDArray[np.float32] | None,
    scale: float,
    softcap: float | None,
) -> Estimates:
    """Estimates of the raw logits of the model: bias added, scaled, soft-capped.

    ``bias`` is that of ``values``' columns (or entries). Later roundings add ``u`` of their result
    on either side, estimate and canonical; ``tanh`` is 1-Lipschitz, and fp32 tanh is trusted to 8
    units in the last place of the cap. Rows whose slack is not finite in fp32 get an infinite one
    and zeros.
    """
    values, slack = estimates.values, estimates.hidden_slack
    with np.errstate(invalid="ignore", over="ignore"):
        if bias is not None or scale != 1.0 or softcap is not None:
            values, slack = _postprocessed(estimates, bias, scale, softcap)
        finite = np.isfinite(slack.astype(np.float32))
    unknown = ~np.logical_and.reduce(finite, axis=1)
    if unknown.any():
        slack = np.where(unknown[:, None], math.inf, slack)
        if values.ndim == 2:
            values = np.where(unknown[:, None], np.float32(0.0), values)
    return estimates._replace(values=values, hidden_slack=slack)


def _postprocessed(
    estimates: Estimates,
    bias: npt.NDArray[np.float32] | None,
    scale: float,
    softcap: float | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    values, slack = estimates.values, estimates.hidden_slack
    largest = estimates.row_slack.max(axis=1, initial=0.0).astype(np.float64)
    reach = np.abs(values).max(axis=1) if values.ndim == 2 else np.abs(values).max(initial=0.0)
    # At least the magnitude of every estimate and canonical logit, whatever has been done to them.
    size = reach + 2.0 * (slack[:, :2] @ largest + slack[:, 2])
    slack = slack.copy()
    if bias is not None:
        values = values + bias
        size = size + np.abs(bias).max(initial=0.0)
        slack[:, 2] += 4 * UNIT_ROUNDOFF * size
    if scale != 1.0:
        values = values * np.float32(scale)
        size = size * abs(scale)
        slack = slack * abs(scale)
        slack[:, 2] += 4 * UNIT_ROUNDOFF * size
    slack[:, 2] = np.where(size < LARGEST_BOUND, slack[:, 2], math.inf)
    if softcap is not None:
        values = (torch.tanh(torch.from_numpy(values / softcap)) * softcap).numpy()
        slack[:, 2] += 2.0**-20 * softcap
    return values.astype(np.float32, copy=False), slack
