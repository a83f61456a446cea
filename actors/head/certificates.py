"""What a step's certificates say: the guarantee of every row, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.head.screened_rows import ScreenedRows
from actors.head.screens import DENSE
from actors.head.whole_softmax import Mass
from actors.messages import Certificate, Need


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """What finding the candidates of a step took, besides the rows it rescored."""

    refined: npt.NDArray[np.int64]  # [N] tokens whose estimates were refined
    largest: npt.NDArray[np.float64]  # [N] the largest upper bound
    masses: dict[int, Mass]  # rows that bounds on the whole softmax decided


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that a pass over all weights, a canonical logit and a refined estimate read."""

    dense_pass: int
    row: int
    refined_row: int


def step_certificates(
    needs: Sequence[Need],
    screened: ScreenedRows | None,
    candidates: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]],
    dense: Sequence[int],
    cost: Cost,
    reading: Reading,
) -> tuple[Certificate, ...]:
    """One certificate per row; the bytes of a pass are shared equally by the rows it served.

    ``candidates`` are adjusted logits [total] and offsets [N + 1]; the rows in ``dense`` have the
    logits of all tokens.
    """
    logits, offsets = candidates
    screened_rows = set() if screened is None else set(screened.rows.tolist())
    dense_rows = set(dense)
    again = 0
    if screened is not None:
        again = sum(mass.screen is not screened.screen for mass in cost.masses.values())
    certificates = []
    for row, need in enumerate(needs):
        count = int(offsets[row + 1] - offsets[row])
        read = 0
        if screened is not None and row in screened_rows:
            read = screened.screen.bytes_per_pass // len(screened_rows)
        if row in dense_rows or screened is None:
            read += reading.dense_pass // max(len(dense_rows), 1)
            fallback = need.kind != "dense"
            certificates.append(
                Certificate(need.kind, "dense", DENSE, count, read, 1.0, fallback, 0.0)
            )
            continue
        screen = screened.screen
        mass = cost.masses.get(row)
        if mass is not None:
            count = mass.rescored
            if mass.screen is not screen:
                screen = mass.screen
                read += screen.bytes_per_pass // again
        vocabulary_size = screened.estimates.row_slack.shape[1]
        failure = min(1.0, screen.failure_probability * vocabulary_size)
        best = float(logits[offsets[row] : offsets[row + 1]].max(initial=-math.inf))
        largest = float(cost.largest[row])
        certificates.append(
            Certificate(
                need.kind,
                "probabilistic" if failure else "deterministic",
                screen.name,
                count,
                read + int(cost.refined[row]) * reading.refined_row + count * reading.row,
                count / vocabulary_size,
                screen is not screened.screen,
                best / largest if 0 < best <= largest else 0.0,
                failure,
            )
        )
    return tuple(certificates)
