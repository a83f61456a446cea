"""Verification with sigmoids in numba: two logits per draft, then one row of each model."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels import pool
from kernels.blocks import BLOCK, blocks_of
from kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from kernels.verify.cpu import acceptance, greedy_token
from kernels.verify.normalizer import block_maxima
from kernels.verify.types import DenseProposals, DraftedRows, Verdict


@njit(nogil=True, cache=True)
def _weight(logit, scale, alpha, beta):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + math.exp(-(np.float64(logit) * scale - alpha) / (beta - alpha)))


@njit(nogil=True, cache=True)
def _log(weight):  # type: ignore[no-untyped-def]
    return math.log(weight) if weight > 0.0 else -np.inf


@njit(nogil=True, cache=True)
def _race(p, scale, q, proposed_scale, residual, limits, maxima, key, position):  # type: ignore[no-untyped-def]
    """The token of the largest ``log max(0, p - q) + noise``, without ``q`` if not ``residual``."""
    alpha, beta = limits
    token, best = -1, -np.inf
    for block in range(maxima.size):
        highest = _log(_weight(maxima[block], scale, alpha, beta))
        uniform, winner = block_draw(key, position, np.uint64(block))
        if highest == -np.inf or highest + noise_ceiling(uniform) < best:
            continue
        smallest = block_minimum(uniform)
        for candidate in range(block * BLOCK, min(block * BLOCK + BLOCK, p.size)):
            left = _weight(p[candidate], scale, alpha, beta)
            if residual:
                left -= _weight(q[candidate], proposed_scale, alpha, beta)
            if left > 0.0:
                noise = token_noise(key, position, candidate, smallest, winner)
                score = math.log(left) + np.float64(noise)
                if score > best:
                    best = score
                    token = candidate
    return token


@njit(nogil=True, cache=True)
def _verify(  # type: ignore[no-untyped-def]
    logits, rows, proposed, proposed_scales, limits, first, last, accepted, tokens, maxima
):
    """Decides the sequences ``first:last``; ``maxima`` [ceil(V / 64)] is scratch."""
    alpha, beta = limits
    for sequence in range(first, last):
        start, stop = rows.offsets[sequence], rows.offsets[sequence + 1]
        scale, proposed_scale = rows.inverse_temperature[sequence], proposed_scales[sequence]
        key = rows.key[sequence]
        for row in range(start, stop):
            position = rows.position[sequence] + np.uint64(row - start)
            tested, draft = row < stop - 1, row - sequence
            token = rows.drafts[draft] if tested else -1
            if scale == 0.0:
                tokens[row] = greedy_token(logits[row])
                stands = tested and tokens[row] == token
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
                if not stands:
                    block_maxima(p, maxima)
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
                                maxima,
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
    accepted = np.zeros(len(rows.offsets) - 1, np.int64)
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
                accepted,
                tokens,
                np.empty(blocks_of(logits.shape[1]), np.float32),
            )
            for first, last in shares
        ]
    )
    return Verdict(accepted, tokens)
