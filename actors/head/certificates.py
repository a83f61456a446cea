"""What a step's certificates say: the guarantee of every row, and what it cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lexshard.actors.head.screens import DENSE, Screen, ScreenedRows
from lexshard.actors.head.softmax.whole_softmax import Mass
from lexshard.actors.messages import MASK_TIER, Certificate, Guarantee, NeedKind
from lexshard.kernels.certified import Certified

# What shards guarantee together is what the first of these that one of them says guarantees; all
# logits of one shard ("dense") take nothing from what another one promises.
WEAKEST_FIRST: tuple[Guarantee, ...] = ("relaxed", "probabilistic", "deterministic", "dense")


@dataclass(frozen=True, slots=True, eq=False)
class SearchCost:
    """What finding the candidates of a step took, besides the rows it rescored."""

    refined: npt.NDArray[np.int64]  # [N] tokens whose estimates were refined
    largest: npt.NDArray[np.float64]  # [N] the largest upper bound
    masses: Mapping[int, Mass]  # rows that bounds on the whole softmax decided
    masked: Collection[int] = ()  # rows whose masks hold few tokens, all of which are computed
    # Canonical logits of rows that took more of them than they have candidates.
    computed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that a pass over all ``size`` weights, a canonical logit and a refined estimate
    read."""

    size: int
    dense_pass: int
    row: int
    refined_row: int


def step_certificates(
    kinds: Sequence[NeedKind],
    screened: ScreenedRows | None,
    candidates: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
    dense: Sequence[int],
    cost: SearchCost,
    reading: Reading,
) -> tuple[Certificate, ...]:
    """One certificate per row; the bytes of a pass are shared equally by the rows it served.

    ``candidates`` are the best adjusted logit that is known of each row [N] and offsets [N + 1];
    the rows in ``dense`` have the logits of all tokens.
    """
    best_logits, offsets = candidates
    screened_rows = set() if screened is None else set(screened.rows.tolist())
    dense_rows = set(dense)
    again = 0
    if screened is not None:
        again = sum(mass.precise for mass in cost.masses.values())
    certificates = []
    for row, kind in enumerate(kinds):
        count = int(offsets[row + 1] - offsets[row])
        if row in cost.masked:
            share, read = count / reading.size, count * reading.row
            certificates.append(
                Certificate(kind, "deterministic", MASK_TIER, count, read, share, False, 0.0)
            )
            continue
        read = 0
        if screened is not None and row in screened_rows:
            read = screened.screen.bytes_per_pass // len(screened_rows)
        if row in dense_rows or screened is None:
            read += reading.dense_pass // max(len(dense_rows), 1)
            fallback = kind != "dense"
            certificates.append(Certificate(kind, "dense", DENSE, count, read, 1.0, fallback, 0.0))
            continue
        tier, failure = screened.screen.name, screened.screen.failure_probability
        count = cost.computed.get(row, count)
        mass = cost.masses.get(row)
        precise = mass is not None and mass.precise
        if mass is not None:
            count = mass.rescored
            if precise:
                tier, failure = DENSE, 0.0
                read += reading.dense_pass // again
        read += int(cost.refined[row]) * reading.refined_row + count * reading.row
        best, largest = float(best_logits[row]), float(cost.largest[row])
        failure = min(1.0, failure * reading.size)
        certificates.append(
            _of_search(kind, tier, failure, count, read, reading.size, best, largest, precise)
        )
    return tuple(certificates)


def search_certificates(
    kinds: Sequence[NeedKind],
    screen: Screen,
    found: Certified,
    counts: Sequence[int],
    reading: Reading,
    together: int,
) -> tuple[Certificate, ...]:
    """One certificate per row of steps of ``together`` rows each, which one call has decided
    (`kernels.certified`, `kernels.steps`) and which computed ``counts`` [N] canonical logits."""
    own = screen.bytes_per_pass // together, screen.name
    failure = min(1.0, screen.failure_probability * reading.size)
    again = found.again.reshape(-1, together)
    # Of the rows of each step for which all weights were multiplied, in place of what it read.
    shares = np.repeat(reading.dense_pass // np.maximum(again.sum(axis=1), 1), together).tolist()
    certificates = []
    for row, (kind, count, refined, best, most, dense) in enumerate(
        zip(
            kinds,
            counts,
            found.refined.tolist(),
            found.best.tolist(),
            found.largest.tolist(),
            found.again.tolist(),
            strict=True,
        )
    ):
        share, tier = (shares[row], DENSE) if dense else own
        read = share + count * reading.row
        read += 0 if dense else refined * reading.refined_row
        fails = 0.0 if dense else failure
        certificates.append(
            _of_search(kind, tier, fails, count, read, reading.size, best, most, dense)
        )
    return tuple(certificates)


def _of_search(
    kind: NeedKind,
    tier: str,
    failure: float,
    count: int,
    read: int,
    size: int,
    best: float,
    largest: float,
    precise: bool = False,
) -> Certificate:
    """Of a row whose candidates, ``count`` of ``size`` tokens, bounds have found."""
    return Certificate(
        kind,
        "probabilistic" if failure else "deterministic",
        tier,
        count,
        read,
        count / size,
        precise,
        best / largest if 0 < best <= largest else 0.0,
        failure,
    )


def merge_certificates(certificates: Sequence[Certificate], vocabulary_size: int) -> Certificate:
    """The certificate of a row from those of shards that make up the vocabulary.

    It guarantees what the weakest does: a probability of failure is at most the sum, a row is dense
    where all are. ``tightness`` is a lower bound of the whole vocabulary's: its best logit is at
    least that of the shard with the largest bound.
    """
    first = certificates[0]
    if len(certificates) == 1:
        return first
    guarantees = {each.guarantee for each in certificates}
    failure = min(1.0, sum(each.failure_probability for each in certificates))
    weakest = next(each for each in WEAKEST_FIRST if each in guarantees)
    rescored = sum(each.rescored_rows for each in certificates)
    return Certificate(
        need=first.need,
        guarantee=weakest,
        tier="+".join(dict.fromkeys(each.tier for each in certificates)),
        rescored_rows=rescored,
        bytes_read=sum(each.bytes_read for each in certificates),
        opened_share=rescored / vocabulary_size,
        fallback=any(each.fallback for each in certificates),
        tightness=min(each.tightness for each in certificates),
        failure_probability=failure,
    )
