"""The mass of tokens whose logits are only known within bounds.

What the certificates of top-p and epsilon need: `outside_mass` bounds all tokens outside of a list,
`plan` says which of the best tokens such a list should hold, from the outlines (`outline`) of all
shards that hold a part of the row; `stands` tells of one token whether top-p certainly leaves
it or leaves it out, which takes no list. `adjusted_bounds` gives the bounds themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.mass import cpu
from lexshard.kernels.mass.reference import BINS, TRIES, Logits, Outline, OutsideMass
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import Estimates, Needs

__all__ = [
    "TRIES",
    "Logits",
    "Outline",
    "OutsideMass",
    "adjusted_bounds",
    "block_ceilings",
    "drawn",
    "heaviest_tokens",
    "outline",
    "outside_mass",
    "plan",
    "stands",
]


def adjusted_bounds(
    estimates: Estimates, vocabulary_size: int, adjustments: Adjustments
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Lower and upper bounds [V] of the adjusted logits of one row, rounded outward."""
    lower, upper = (np.empty(vocabulary_size, np.float32) for _ in range(2))
    bounds = (estimates.values, estimates.row_slack, estimates.hidden_slack, adjustments, 0)
    cpu.write_bounds(*bounds, 1, lower)
    cpu.write_bounds(*bounds, 0, upper)
    return lower, upper


def outside_mass(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> OutsideMass:
    """Bounds on the tempered mass of all tokens but a row's ``ids`` (ragged, as elsewhere)."""
    bounds = (estimates.values, estimates.row_slack, estimates.hidden_slack)
    found = cpu.outside_mass(*bounds, vocabulary_size, needs, adjustments, ids, offsets)
    return OutsideMass(*found)


def drawn(needs: Needs, candidates: Logits) -> int:
    """The place of what one row draws from its ``candidates``, -1 where all are excluded."""
    scale = needs.inverse_temperature[0]
    place: int = cpu.drawn(*candidates, needs.key[0], needs.position[0], scale)
    return place


def stands(
    estimates: Estimates,
    needs: Needs,
    adjustments: Adjustments,
    top_p: float,
    token: Logits,
    largest: float,
    ceilings: npt.NDArray[np.float32],
    known: Logits,
    *,
    inside: bool = True,
) -> bool:
    """Whether one ``token`` certainly stands ``inside`` of the nucleus of a row, or outside of it:
    the fewest best tokens that hold ``top_p`` of the softmax, as `kernels.truncate` defines them.

    It stands inside if all better ones hold less, and then it is what is drawn from the nucleus if
    it is what is drawn from all tokens; which tokens the nucleus holds is not known. No upper bound
    is above ``largest``, nor above the one of ``ceilings`` (`block_ceilings`) of its block. Of
    ``known`` tokens, sorted, their logits count, of others their bounds.
    """
    scale, ids, logits = needs.inverse_temperature[0], *token
    found: bool = cpu.stands(
        *_only_row(estimates, adjustments),
        scale,
        top_p,
        ids[0],
        logits[0],
        largest,
        ceilings,
        *known,
        inside,
    )
    return found


def block_ceilings(
    estimates: Estimates, adjustments: Adjustments, maxima: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Per block of one row a bound on the adjusted upper bounds of its tokens; ``maxima`` [V / 64]
    as `kernels.search.find_leaders` finds them."""
    values, row_slack, hidden_slack, *row = _only_row(estimates, adjustments)
    bounds = (values, row_slack, hidden_slack, estimates.block_slack, *row)
    found: npt.NDArray[np.float32] = cpu.ceilings_of(*bounds, maxima)
    return found


def heaviest_tokens(
    estimates: Estimates, adjustments: Adjustments, ceilings: npt.NDArray[np.float32]
) -> npt.NDArray[np.int32]:
    """The tokens of one row, sorted, whose logits are worth knowing where its bounds do not tell:
    those with the largest upper bounds, at most one of `HEAVY_SHARE`."""
    found: npt.NDArray[np.int32] = cpu.heaviest(*_only_row(estimates, adjustments), ceilings)
    return found


def _only_row(estimates: Estimates, adjustments: Adjustments) -> tuple[Any, ...]:
    """How numba takes the bounds of one row."""
    bounds = (estimates.values[0], estimates.row_slack, estimates.hidden_slack[0])
    return (*bounds, adjustments, 0)


def outline(
    estimates: Estimates, vocabulary_size: int, needs: Needs, adjustments: Adjustments
) -> list[Outline | None]:
    """Where the tokens of every row lie; None where estimates are too large to tell."""
    counts, errors = np.empty(BINS, np.int32), np.empty(BINS, np.float64)
    bounds = (estimates.values, estimates.row_slack, estimates.hidden_slack)
    result: list[Outline | None] = []
    for row, scale in enumerate(needs.inverse_temperature):
        top, known, last, widest = cpu.outline_row(
            *bounds, vocabulary_size, scale, adjustments, row, counts, errors
        )
        own = slice(last + 1)
        found = Outline(top, counts[own].copy(), errors[own].astype(np.float32), widest)
        result.append(found if known else None)
    return result


def plan(outlines: Sequence[Outline], top_p: float, epsilon: float) -> tuple[int, int]:
    """Which tokens of one row to compute exactly, so that a certificate is likely: those in the
    bin that is returned or above, and how many they are.

    ``outlines`` are of disjoint sets of tokens that make up the row, added up in this order. With
    ``epsilon`` above 0: so many that at most epsilon of the mass is outside. Otherwise the nucleus
    of ``top_p`` and as many more as it takes until the uncertainty of what is left is below half
    the mass of the nucleus' last token. A guess from estimates: what it leads to is certified
    afterwards.
    """
    top = max(each.top for each in outlines)
    counts, errors = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
    for each in outlines:
        first = top - each.top
        own = slice(first, first + len(each.counts))
        counts[own] += each.counts[: max(BINS - first, 0)]
        errors[own] += each.errors[: max(BINS - first, 0)]
    if epsilon > 0.0:
        last = cpu.plan_epsilon(counts, errors, epsilon)
    else:
        last = cpu.plan_nucleus(counts, errors, max(each.widest for each in outlines), top_p)
    return top - last, int(counts[: last + 1].sum())
