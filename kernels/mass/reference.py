"""Masses, stated plainly: full rows of bounds, sums of exponentials, sorts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise.reference import gumbel_noise
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import Estimates, Needs
from lexshard.kernels.search.reference import adjusted_row, outward

# Above every rounding of a log-sum-exp of 2**20 terms.
MASS_MARGIN = 1e-9
# Plans look at tempered estimates in bins of 1/16, down to 48 below the best.
BIN_WIDTH = 1.0 / 16.0
BINS = 768
# Numbers of bins beyond this say nothing: float64 does not tell neighbouring bins apart there.
LARGEST_PLACE = 2**50
# Of a row's mass: above all that fp32 exponentials and their sums lose, and above the rounding of
# masses to integers by which nuclei are defined.
MEMBER_MARGIN = 2.0**-12
# A token this far below the largest bound, in logits times s, has no share that fp32 could tell.
FARTHEST_DRAWN = 60.0
# The share of the vocabulary whose logits are worth computing where bounds do not tell.
HEAVY_SHARE = 64
# Of tokens that lie outside, one after the other: each leaves top_p of what is left, or more.
TRIES = 8
# The uncertainty of the total mass that a plan accepts, in masses of the last token of the nucleus.
CONFIDENCE = 0.5


class Logits(NamedTuple):
    """Canonical logits of some tokens of one row, after its processors."""

    ids: npt.NDArray[np.int32]  # [K] sorted
    logits: npt.NDArray[np.float32]  # [K]

    def at(self, place: int) -> Logits:
        """One of them."""
        return Logits(self.ids[place : place + 1], self.logits[place : place + 1])


class OutsideMass(NamedTuple):
    """What the tokens outside a list can amount to, per row."""

    log_upper: npt.NDArray[np.float64]  # [N] log-sum-exp of upper bounds times s, rounded up
    log_lower: npt.NDArray[np.float64]  # [N] of lower bounds, rounded down
    largest: npt.NDArray[np.float64]  # [N] the largest upper bound, not scaled by s


class Outline(NamedTuple):
    """Where the tokens of one row lie, by their estimates, in bins of tempered logit.

    Bin ``b`` holds estimates with ``floor(estimate * s / BIN_WIDTH) == b`` on every shard, so
    that outlines of disjoint sets of tokens add up. Excluded tokens and those ``BINS`` or more
    below the best one are left out.
    """

    top: int  # number of the first bin, that of the best estimate
    counts: npt.NDArray[np.int32]  # [B] tokens per bin, from ``top`` downwards
    errors: npt.NDArray[np.float32]  # [B] their slack times s, summed
    widest: float  # the largest slack among them, in bins

    def count_from(self, lowest: int) -> int:
        """How many tokens lie in bin ``lowest`` or above."""
        return int(self.counts[: max(self.top - lowest + 1, 0)].sum())


def adjusted_bounds(
    estimates: Estimates, vocabulary_size: int, adjustments: Adjustments
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    every = np.arange(vocabulary_size, dtype=np.int32)
    values = estimates.values[0, :vocabulary_size]
    slack = outward(values, estimates.row_slack, estimates.hidden_slack[0])
    lower = adjusted_row(every, values - slack, adjustments, 0)
    return lower, adjusted_row(every, values + slack, adjustments, 0)


def outside_mass(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> OutsideMass:
    every = np.arange(vocabulary_size, dtype=np.int32)
    result = np.empty((3, len(estimates.values)))
    for row, wide in enumerate(estimates.values):
        values = wide[:vocabulary_size]
        slack = outward(values, estimates.row_slack, estimates.hidden_slack[row])
        outside = np.ones(vocabulary_size, np.bool_)
        outside[ids[offsets[row] : offsets[row + 1]]] = False
        upper = adjusted_row(every, values + slack, adjustments, row)[outside]
        lower = adjusted_row(every, values - slack, adjustments, row)[outside]
        scale = needs.inverse_temperature[row]
        result[0, row] = _log_sum(upper, scale) + MASS_MARGIN
        result[1, row] = _log_sum(lower, scale) - MASS_MARGIN
        result[2, row] = upper.max(initial=-np.inf)
    return OutsideMass(*result)


def drawn(needs: Needs, candidates: Logits) -> int:
    noise = gumbel_noise(int(needs.key[0]), int(needs.position[0]), candidates.ids)
    scores = candidates.logits.astype(np.float64) * needs.inverse_temperature[0] + noise
    return int(scores.argmax()) if scores.max(initial=-np.inf) > -np.inf else -1


def stands(
    estimates: Estimates,
    needs: Needs,
    adjustments: Adjustments,
    top_p: float,
    token: Logits,
    largest: float,
    known: Logits,
    *,
    inside: bool,
) -> bool:
    size, scale = estimates.row_slack.shape[1], needs.inverse_temperature[0]
    every, logit = np.arange(size, dtype=np.int32), float(token.logits[0])
    values = estimates.values[0, :size]
    slack = outward(values, estimates.row_slack, estimates.hidden_slack[0])
    upper = adjusted_row(every, values + slack, adjustments, 0).astype(np.float64)
    lower = adjusted_row(every, values - slack, adjustments, 0).astype(np.float64)
    upper[known.ids] = lower[known.ids] = known.logits
    one, other = (upper, lower) if inside else (lower, upper)
    better = upper >= logit if inside else lower > logit
    top, others = max(largest, logit), every != token.ids[0]
    above = np.exp((one[better & others] - top) * scale).sum()
    below = np.exp((other[~better & others] - top) * scale).sum()
    distance = (logit - top) * scale
    total = above + below + np.exp(distance)
    if distance < -FARTHEST_DRAWN:
        return False
    if inside:
        return bool(above < (top_p - MEMBER_MARGIN) * total)
    return bool(above > (top_p + MEMBER_MARGIN) * total)


def _log_sum(values: npt.NDArray[np.float32], scale: float) -> float:
    scaled = values.astype(np.float64) * scale
    return float(np.logaddexp.reduce(scaled)) if len(scaled) else -np.inf


def outline(
    estimates: Estimates, vocabulary_size: int, needs: Needs, adjustments: Adjustments
) -> list[Outline | None]:
    every = np.arange(vocabulary_size, dtype=np.int32)
    result: list[Outline | None] = []
    for row, wide in enumerate(estimates.values):
        values = wide[:vocabulary_size]
        zero = np.zeros_like(values)
        slack = outward(zero, estimates.row_slack, estimates.hidden_slack[row]).astype(np.float64)
        adjusted = adjusted_row(every, values, adjustments, row).astype(np.float64)
        kept = adjusted > -np.inf
        place = adjusted[kept] * (needs.inverse_temperature[row] / BIN_WIDTH)
        if not np.all(np.abs(place) < LARGEST_PLACE):
            result.append(None)
            continue
        bins, scaled = (
            np.floor(place).astype(np.int64),
            slack[kept] * (needs.inverse_temperature[row]),
        )
        top = int(bins.max(initial=-LARGEST_PLACE))
        near = top - bins < BINS
        below, scaled = top - bins[near], scaled[near]
        result.append(
            Outline(
                top,
                np.bincount(below).astype(np.int32),
                np.bincount(below, scaled).astype(np.float32),
                float(scaled.max(initial=0.0)) / BIN_WIDTH,
            )
        )
    return result


def plan(outlines: Sequence[Outline], top_p: float, epsilon: float) -> tuple[int, int]:
    top = max(each.top for each in outlines)
    counts, errors = np.zeros(BINS), np.zeros(BINS)
    for each in outlines:
        for below, (count, error) in enumerate(zip(each.counts, each.errors, strict=True)):
            if top - each.top + below < BINS:
                counts[top - each.top + below] += count
                errors[top - each.top + below] += error
    weights = np.exp(-(np.arange(BINS) + 0.5) * BIN_WIDTH)
    masses, uncertain = counts * weights, errors * weights
    for last in range(BINS):
        outside, unsure = masses[last + 1 :].sum(), uncertain[last + 1 :].sum()
        if epsilon > 0.0:
            good = outside + unsure < 0.9 * epsilon * masses.sum()
        else:
            reached = np.cumsum(masses) >= top_p * masses.sum()
            edge = int(np.argmax(reached)) if reached.any() else BINS - 1
            widest = max(each.widest for each in outlines)
            good = last > edge + 2.0 * widest + 1.0 and 2.0 * unsure < CONFIDENCE * weights[edge]
        if good:
            break
    return top - last, int(counts[: last + 1].sum())
