"""Guarantees about the whole softmax from a part of it: top-p sets and epsilon.

The best tokens are computed exactly, the mass of all others is bounded from both sides by the
screen. How many those best are is planned from the estimates; where no plan promises a certificate
at less than the dense way costs, none is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.head.rescoring import Rescorer
from actors.head.screens import Screen
from actors.messages import Need
from kernels.certify import epsilon_certificate, nucleus_certificate
from kernels.mass import outside_mass, plan
from kernels.penalties import Adjustments
from kernels.search import TOP_K, Estimates, Needs, find_leaders
from kernels.truncate import best_ids

# Beyond this share of the vocabulary the dense way is as cheap.
LARGEST_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Mass:
    """The tokens that hold the wanted mass, sorted, and what it took to certify them."""

    ids: npt.NDArray[np.int32]
    rescored: int
    screen: Screen


def find_mass(
    row: tuple[Estimates, Needs, Adjustments],
    rescorer: Rescorer,
    hidden: npt.NDArray[np.float32],
    need: Need,
    screen: Screen,
) -> Mass | None:
    """The nucleus or epsilon set of one row, ``hidden`` [1, d]; None where bounds are too loose."""
    estimates, needs, adjustments = row
    size = rescorer.vocabulary_size
    top_p, epsilon = np.array([need.top_p]), np.array([need.epsilon])
    count = int(plan(estimates, size, needs, adjustments, top_p, epsilon)[0])
    if count > LARGEST_SHARE * size:
        return None
    wanted = needs._replace(kind=np.array([TOP_K]), k=np.array([count]))
    ids, offsets, _, _ = find_leaders(estimates, size, wanted, adjustments)
    exact = rescorer.adjusted(hidden, ids, offsets, adjustments)
    outside = outside_mass(estimates, size, needs, adjustments, ids, offsets)
    upper, lower, largest = (float(each[0]) for each in outside)
    if need.kind == "epsilon":
        certain = epsilon_certificate(exact, need.inverse_temperature, need.epsilon, upper)
        return Mass(ids, len(ids), screen) if certain else None
    kept = nucleus_certificate(
        exact,
        need.inverse_temperature,
        need.top_p,
        upper,
        lower,
        largest,
        outside_count=size - len(ids),
    )
    return Mass(np.sort(ids[best_ids(exact, kept)]), len(ids), screen) if kept > 0 else None
