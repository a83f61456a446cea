"""How many rows a screen cannot exclude, measured on calibration hidden states.

As the certificate ladder works: a value ``tau`` that the answer certainly reaches, and every row
whose upper bound reaches it is kept. Here ``tau`` is the best there can be, from all canonical
logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.head_weights import HeadWeights
from lexshard.actors.index.metadata import NEEDS, Tightness
from lexshard.kernels import pool
from lexshard.kernels.bounds import Clusters, cluster_bounds
from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.quantize import Int4Tier, Tier
from lexshard.kernels.rows import canonical_logits, postprocess
from lexshard.kernels.screen import Screened, refine, screen

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

TOP_K = 50
NOISE_KEY = 0
ROWS = 16  # hidden states at a time
ERROR_SAMPLE = 1024  # output rows whose estimates are compared with canonical logits

# Read only for rows that the high plane could not exclude.
LOW_PLANE = ("low", "fine_row_slack")


def thresholds(head: HeadWeights, hidden: Float32s) -> Float32s:
    """Per hidden state and need the value that decides: [N, 3], from canonical logits.

    Without noise for the first two needs; the noise of row ``n`` is that of position ``n``.
    """

    def reached(first: int, states: Float32s) -> list[tuple[float, float, float]]:
        found = []
        for row, raw in enumerate(canonical_logits(states, head.weight), first):
            logits = _finished(raw, head)
            k = min(TOP_K, len(logits))
            noisy = logits + _noise(row, len(logits))
            found.append((logits.max(), np.partition(logits, -k)[-k], noisy.max()))
        return found

    found = pool.results([partial(reached, *block) for block in _blocks(hidden)])
    return np.array([row for block in found for row in block], np.float32)


def measure_tiers(
    tiers: Sequence[Tier], head: HeadWeights, hidden: Float32s, tau: Float32s
) -> list[Tightness]:
    """How tightly each of ``tiers`` screens ``hidden`` [N, d] against ``tau`` [N, 3]."""
    vocabulary = len(head.weight)
    sample = np.linspace(0, vocabulary - 1, min(vocabulary, ERROR_SAMPLE)).astype(np.int64)
    measured: list[list[_Row]] = [[] for _ in tiers]
    for first, states in _blocks(hidden):
        exact = canonical_logits(states, head.weight[sample])
        for rows, tier in zip(measured, tiers, strict=True):
            # 16 bits on every CPU: the report must not depend on where it was made.
            screened = screen(states, tier, hidden_bits=16)
            one = partial(_measure_row, tier, head, states, screened, exact, sample)
            pieces = [partial(one, n, first + n, tau[first + n]) for n in range(len(states))]
            rows += pool.results(pieces)
    return [_tightness(tier, head, rows) for tier, rows in zip(tiers, measured, strict=True)]


class _Row(NamedTuple):
    """How tightly one hidden state is screened."""

    kept: list[int]  # by need
    refined: list[int]
    bound: float  # means over a sample of rows
    square: float


def _measure_row(
    tier: Tier,
    head: HeadWeights,
    states: Float32s,
    screened: Screened,
    exact: Float32s,
    sample: npt.NDArray[np.int64],
    n: int,
    row: int,
    tau: Float32s,
) -> _Row:
    noise = _noise(row, len(head.weight))
    slack = _slack(screened.row_slack, screened.hidden_slack[n])
    estimate = screened.estimate[n]
    error = (estimate[sample] - exact[n]).astype(np.float64)
    masks = _reaching(_finished(estimate + slack, head), noise, tau)
    refined = [0] * len(NEEDS)
    if isinstance(tier, Int4Tier):
        ids = np.flatnonzero(masks[0] | masks[1] | masks[2]).astype(np.int32)
        left = _reaching(_refined(states[n : n + 1], tier, head, ids), noise[ids], tau)
        refined = [
            int(np.count_nonzero(mask[ids] & still))
            for mask, still in zip(masks, left, strict=True)
        ]
    kept = [int(np.count_nonzero(mask)) for mask in masks]
    bound = float(slack[sample].mean(dtype=np.float64))
    return _Row(kept, refined, bound, float(np.square(error).mean()))


def opened_share(
    clusters: Clusters, head: HeadWeights, hidden: Float32s, tau: Float32s
) -> dict[str, dict[str, float]]:
    """By bound and need the mean share of rows in clusters that could not be excluded."""
    vocabulary, sizes = len(head.weight), clusters.sizes
    shares: dict[str, Float64s] = {kind: np.zeros(len(NEEDS)) for kind in ("ball", "cone", "best")}
    for first, states in _blocks(hidden):
        noises = [_noise(first + n, vocabulary)[clusters.order] for n in range(len(states))]
        largest = [np.maximum.reduceat(noise, clusters.offsets[:-1]) for noise in noises]
        for kind, share in shares.items():
            upper = cluster_bounds(states, clusters, kind=kind)  # type: ignore[arg-type]
            upper = postprocess(upper, scale=head.scale, softcap=head.softcap)
            for n in range(len(states)):
                masks = _reaching(upper[n], largest[n], tau[first + n])
                share += [sizes[mask].sum() / (vocabulary * len(hidden)) for mask in masks]
    return {kind: _by_need(share) for kind, share in shares.items()}


def arrays_of(value: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and array of every array in a tier, also in what it contains."""
    for field in fields(value):
        child = getattr(value, field.name)
        if isinstance(child, np.ndarray):
            yield field.name, child
        elif hasattr(child, "__dataclass_fields__"):
            yield from arrays_of(child)


def screened_bytes(tier: Tier) -> int:
    """Bytes of one pass over the tier."""
    return sum(array.nbytes for name, array in arrays_of(tier) if name not in LOW_PLANE)


def _refined_row_bytes(tier: Int4Tier) -> int:
    """Bytes of one row in both planes."""
    planes = (tier.high, tier.low, tier.multipliers, tier.scale)
    return sum(array.nbytes for array in planes) // len(tier.scale) + 8


def _tightness(tier: Tier, head: HeadWeights, rows: Sequence[_Row]) -> Tightness:
    kept, refined, bound, square = (
        np.array(each, np.float64).mean(axis=0) for each in zip(*rows, strict=True)
    )
    row_bytes = head.weight.shape[1] * head.weight.element_size()
    read = screened_bytes(tier) + kept * row_bytes
    if isinstance(tier, Int4Tier):
        read = screened_bytes(tier) + kept * _refined_row_bytes(tier) + refined * row_bytes
    return Tightness(
        kept=_by_need(kept),
        refined=_by_need(refined) if isinstance(tier, Int4Tier) else None,
        bytes_read=_by_need(read),
        bound=float(bound),
        error=float(np.sqrt(square)),
    )


def _slack(row_slack: Float32s, hidden_slack: Float64s) -> Float32s:
    """Error bounds of one hidden state [V]; fp32 is enough to count with."""
    first, second = hidden_slack.astype(np.float32)
    return row_slack[0] * first + row_slack[1] * second


def _refined(
    state: Float32s, tier: Int4Tier, head: HeadWeights, ids: npt.NDArray[np.int32]
) -> Float32s:
    """Upper bounds of the rows ``ids`` for ``state`` [1, d], from both planes."""
    screened = refine(state, tier, ids, np.array([0, len(ids)]))
    slack = _slack(screened.row_slack[:, ids], screened.hidden_slack[0])
    return _finished(screened.estimate + slack, head, ids)


def _reaching(upper: Float32s, noise: Float32s, tau: Float32s) -> list[npt.NDArray[np.bool_]]:
    """By need which of ``upper`` [W] reach ``tau`` [3]."""
    return [upper >= tau[0], upper >= tau[1], upper + noise >= tau[2]]


def _finished(
    logits: Float32s, head: HeadWeights, ids: npt.NDArray[np.int32] | None = None
) -> Float32s:
    """Raw logits of all rows or of ``ids`` with bias, scale and soft-cap."""
    bias = None if head.bias is None else head.bias.numpy()
    if bias is not None and ids is not None:
        bias = bias[ids]
    return postprocess(logits, bias=bias, scale=head.scale, softcap=head.softcap)


def _noise(row: int, vocabulary: int) -> Float32s:
    return gumbel_row(NOISE_KEY, row, vocabulary)


def _blocks(hidden: Float32s) -> Iterator[tuple[int, Float32s]]:
    for first in range(0, len(hidden), ROWS):
        yield first, hidden[first : first + ROWS]


def _by_need(values: Float64s) -> dict[str, float]:
    return {need: float(value) for need, value in zip(NEEDS, values, strict=True)}
