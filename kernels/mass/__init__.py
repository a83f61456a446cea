"""The mass of tokens whose logits are only known within bounds.

What the certificates of top-p and epsilon need: `outside_mass` bounds all tokens outside of a list,
`plan` says which of the best tokens such a list should hold, from the outlines (`outline`) of all
who hold a part of the row. `adjusted_bounds` gives the bounds themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.mass import cpu, reference
from lexshard.kernels.mass.reference import Outline, OutsideMass
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import Estimates, Needs

Implementation = Literal["reference", "cpu"]

__all__ = ["Outline", "OutsideMass", "adjusted_bounds", "outline", "outside_mass", "plan"]


def adjusted_bounds(
    estimates: Estimates,
    vocabulary_size: int,
    adjustments: Adjustments,
    *,
    implementation: Implementation | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Lower and upper bounds [V] of the adjusted logits of one row, rounded outward."""
    return _module(implementation).adjusted_bounds(estimates, vocabulary_size, adjustments)


def outside_mass(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    *,
    implementation: Implementation | None = None,
) -> OutsideMass:
    """Bounds on the tempered mass of all tokens but a row's ``ids`` (ragged, as elsewhere)."""
    module = _module(implementation)
    return module.outside_mass(estimates, vocabulary_size, needs, adjustments, ids, offsets)


def outline(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    *,
    implementation: Implementation | None = None,
) -> list[Outline | None]:
    """Where the tokens of every row lie; None where estimates are too large to tell."""
    module = _module(implementation)
    return module.outline(estimates, vocabulary_size, needs, adjustments)


def plan(
    outlines: Sequence[Outline],
    top_p: float,
    epsilon: float,
    *,
    implementation: Implementation | None = None,
) -> tuple[int, int]:
    """Which tokens of one row to compute exactly, so that a certificate is likely: those in the
    bin that is returned or above, and how many they are.

    ``outlines`` are of disjoint sets of tokens that make up the row, added up in this order. With
    ``epsilon`` above 0: so many that at most epsilon of the mass is outside. Otherwise the nucleus
    of ``top_p`` and as many more as it takes until the uncertainty of what is left is below half
    the mass of the nucleus' last token. A guess from estimates: what it leads to is certified
    afterwards.
    """
    return _module(implementation).plan(outlines, top_p, epsilon)


def _module(implementation: Implementation | None) -> Any:
    return reference if implementation == "reference" else cpu
