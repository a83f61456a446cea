"""Verification with sigmoids in numba: two logits per draft, then one row of each model.

What is left of a weight where another is taken off is so small, with limits far apart, that the
weight alone bounds it badly: nearly every block of the vocabulary could hold the winner. But a
sigmoid rises by at most a quarter of what its argument does, and so does the difference of two.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels import pool
from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.noise.cpu import LOG_2, block_draw, block_minimum, noise_ceiling, token_noise
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.rounding import NOISE_ROUNDING
from lexshard.kernels.verify.cpu import acceptance, greedy_token
from lexshard.kernels.verify.normalizer import block_maxima
from lexshard.kernels.verify.types import DenseProposals, DraftedRows, Verdict

CHUNK = 16 * BLOCK
# Above the error of a difference of two scaled logits in fp32, as a share of their sizes.
DIFFERENCE_ERROR = np.float32(2.0**-22)
LOG_QUARTER = math.log(0.25)
# Of the rounding of two sigmoids, which alone can make a difference of them.
LOG_SIGMOID_ERROR = math.log(1e-15)
# `log2 x <= e + f - 1 + this` for ``x = 2**e f`` with ``1 <= f < 2``.
LOG2_BULGE = 0.0861


class SigmoidScratch(NamedTuple):
    """What one thread works in, beside the logits."""

    maxima: npt.NDArray[np.float32]  # [ceil(V / 64)]
    bounds: npt.NDArray[np.float64]  # [ceil(V / 64)]
    rises: npt.NDArray[np.float32]  # [ceil(V / 64)]
    differences: npt.NDArray[np.float32]  # [CHUNK]

    @classmethod
    def of(cls, size: int) -> SigmoidScratch:
        blocks = blocks_of(size)
        single = np.float32
        return cls(
            np.empty(blocks, single),
            np.empty(blocks),
            np.empty(blocks, single),
            np.empty(CHUNK, single),
        )


@njit(nogil=True, cache=True)
def _weight(logit, scale, alpha, beta):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + math.exp(-(np.float64(logit) * scale - alpha) / (beta - alpha)))


@njit(nogil=True, cache=True)
def _log(weight):  # type: ignore[no-untyped-def]
    return math.log(weight) if weight > 0.0 else -np.inf


@njit(nogil=True, cache=True)
def _log_above(value):  # type: ignore[no-untyped-def]
    """Above the logarithm of a positive float64, without one."""
    return LOG_2 * (np.float64(np.float64(value).view(np.int64)) * 2.0**-52 - 1023.0 + LOG2_BULGE)


@njit(nogil=True, cache=True)
def _subtract(p, scale, q, proposed_scale, differences):  # type: ignore[no-untyped-def]
    """Writes bounds on ``p scale - q proposed_scale``."""
    for index in range(p.size):
        left, right = p[index] * scale, q[index] * proposed_scale
        bound = (left - right) + (abs(left) + abs(right)) * DIFFERENCE_ERROR
        bound = bound if bound == bound else np.float32(np.inf)  # where infinities met
        differences[index] = MINUS_INFINITY if p[index] == MINUS_INFINITY else bound


@njit(nogil=True, cache=True)
def _read(p, scale, q, proposed_scale, residual, scratch):  # type: ignore[no-untyped-def]
    """Writes the largest logit of the target in every block and, of a ``residual``, a bound on how
    far one is above the proposal's, both scaled."""
    for first in range(0, p.size, CHUNK):
        stop = min(first + CHUNK, p.size)
        block_maxima(p[first:stop], scratch.maxima[first // BLOCK :])
        if residual:
            own = scratch.differences[: stop - first]
            _subtract(
                p[first:stop], np.float32(scale), q[first:stop], np.float32(proposed_scale), own
            )
            block_maxima(own, scratch.rises[first // BLOCK :])


@njit(nogil=True, cache=True)
def _block_bounds(scale, residual, limits, scratch, key, position):  # type: ignore[no-untyped-def]
    """Writes a bound on the scores of every block: with ``z`` the argument of a sigmoid, a weight
    is below 1 and ``e**z``, and rises by at most a quarter, or itself, of what ``z`` does."""
    alpha, beta = limits
    for block in range(scratch.maxima.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        z = (np.float64(scratch.maxima[block]) * scale - alpha) / (beta - alpha)
        bound = min(z, 0.0)
        if residual:
            rise = max(np.float64(scratch.rises[block]) / (beta - alpha), 1e-300)
            bound = min(bound, _log_above(rise) + min(z, LOG_QUARTER))
            bound = max(bound, LOG_SIGMOID_ERROR)
        scratch.bounds[block] = bound + noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def _race(p, scale, q, proposed_scale, residual, limits, scratch, key, position):  # type: ignore[no-untyped-def]
    """The token of the largest ``log max(0, p - q) + noise``, without ``q`` if not ``residual``."""
    alpha, beta = limits
    _block_bounds(scale, residual, limits, scratch, key, position)
    bounds = scratch.bounds
    likely = np.argmax(bounds)
    token, best = -1, -np.inf
    for step in range(-1, bounds.size):
        block = likely if step < 0 else step
        if step == likely or bounds[block] < best or scratch.maxima[block] == MINUS_INFINITY:
            continue
        uniform, winner = block_draw(key, position, np.uint64(block))
        smallest = block_minimum(uniform)
        highest = NOISE_ROUNDING - math.log(smallest)
        for candidate in range(block * BLOCK, min(block * BLOCK + BLOCK, p.size)):
            z = (np.float64(p[candidate]) * scale - alpha) / (beta - alpha)
            bound = min(z, 0.0)
            if residual:
                rise = z - (np.float64(q[candidate]) * proposed_scale - alpha) / (beta - alpha)
                # As for a block, with log x <= x - 1.
                bound = max(z + min(0.0, rise - 1.0), LOG_SIGMOID_ERROR)
            if bound + highest < best:
                continue
            left = _weight(p[candidate], scale, alpha, beta)
            if residual:
                left -= _weight(q[candidate], proposed_scale, alpha, beta)
            if left <= 0.0:
                continue
            score = math.log(left)
            if score + highest < best:
                continue
            score += np.float64(token_noise(key, position, candidate, smallest, winner))
            if score > best or (score == best and candidate < token):
                best = score
                token = candidate
    return token


@njit(nogil=True, cache=True)
def _verify(  # type: ignore[no-untyped-def]
    logits, rows, proposed, proposed_scales, limits, first, last, verdict, scratch
):
    """Decides the sequences ``first:last``."""
    accepted, tokens, logits_read = verdict
    alpha, beta = limits
    bonus = np.int64(rows.bonus)
    for sequence in range(first, last):
        start, stop = rows.offsets[sequence], rows.offsets[sequence + 1]
        scale, proposed_scale = rows.inverse_temperature[sequence], proposed_scales[sequence]
        key = rows.key[sequence]
        for row in range(start, stop):
            position = rows.position[sequence] + np.uint64(row - start)
            tested, draft = row < stop - bonus, row - sequence * bonus
            token = rows.drafts[draft] if tested else -1
            if scale == 0.0:
                tokens[row] = greedy_token(logits[row])
                stands = tested and tokens[row] == token
                logits_read[sequence] += logits.shape[1]
            else:
                stands = False
                p = logits[row]
                q = proposed[draft] if tested else p
                noise_key = key
                if tested:
                    uniform, noise_key = acceptance(key, position)
                    log_p = _log(_weight(p[token], scale, alpha, beta))
                    log_q = _log(_weight(q[token], proposed_scale, alpha, beta))
                    stands = math.log(uniform) < log_p - log_q
                    logits_read[sequence] += 2
                if not stands:
                    logits_read[sequence] += p.size * (2 if tested else 1)
                    _read(p, scale, q, proposed_scale, tested, scratch)
                    token = -1
                    for residual in (tested, False):
                        if token < 0:
                            token = _race(
                                p,
                                scale,
                                q,
                                proposed_scale,
                                residual,
                                limits,
                                scratch,
                                noise_key,
                                position,
                            )
                tokens[row] = token
            if not stands:
                break
            accepted[sequence] += 1


def verify_by_sigmoid(
    logits: npt.NDArray[np.float32],
    rows: DraftedRows,
    proposals: DenseProposals,
    alpha: float,
    beta: float,
) -> Verdict:
    tokens = np.full(len(logits), -1, np.int64)
    sequences = len(rows.offsets) - 1
    verdict = (np.zeros(sequences, np.int64), tokens, np.zeros(sequences, np.int64))
    shares = pool.even_shares(np.diff(rows.offsets).tolist(), pool.threads())
    limits = (float(alpha), float(beta))
    pool.run(
        [
            partial(
                _verify,
                logits,
                rows,
                proposals.logits,
                proposals.inverse_temperature,
                limits,
                first,
                last,
                verdict,
                SigmoidScratch.of(logits.shape[1]),
            )
            for first, last in shares
        ]
    )
    return Verdict(*verdict)
