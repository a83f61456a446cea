"""Whether what a row has drawn from all tokens lies in its nucleus: the last launches of a search.

The nucleus are the fewest best tokens that hold ``top_p`` of a softmax. A token lies in it if what
all better ones hold is less, and for that bounds on the others' logits are enough: the mass of
those that may be better, from above, and of all others, from below (`kernels.mass.stands`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.mass.reference import FARTHEST_DRAWN, MEMBER_MARGIN
from lexshard.kernels.search.gpu.triton_bounds import (
    C_GUMBEL,
    C_INTEGERS,
    C_REALS,
    C_TILE,
    raised,
    slack_of,
)

_MARGIN = tl.constexpr(MEMBER_MARGIN)
_FARTHEST = tl.constexpr(-FARTHEST_DRAWN)
# A soft-cap may round to another fp32 number on a host.
_LOWER = tl.constexpr(2.0**-20)


@triton.jit
def _asks(questions, row):  # type: ignore[no-untyped-def]
    """Whether a row draws from a nucleus alone."""
    kind = tl.load(questions.integers + row * C_INTEGERS)
    return (kind == C_GUMBEL) & (tl.load(questions.reals + row * C_REALS + 4) < 1.0)


@triton.jit
def masses_kernel(screened, questions, buffers, results, tiles):  # type: ignore[no-untyped-def]
    """Per tile the mass of tokens that may be better than the one that is drawn, from above, and of
    all others but that, from below: in shares of what the largest upper bound of the row has."""
    row = tl.program_id(1).to(tl.int64)
    level = tl.load(buffers.levels + row)
    if _asks(questions, row) & (level > float("-inf")):
        tile = tl.program_id(0)
        scale = tl.load(questions.reals + row * C_REALS).to(tl.float32)
        top = tl.load(results.largest + row)
        drawn = tl.load(results.drawn + row)
        ids = tile * C_TILE + tl.arange(0, C_TILE)
        inside = ids < screened.size
        values = screened.estimates + row * screened.width
        value = tl.load(values + ids, mask=inside, other=float("-inf"))
        slack = slack_of(screened, value, buffers.factors, row, ids, inside)
        upper = raised(value, slack)
        others = ids != drawn
        better = upper >= level - tl.abs(level) * _LOWER
        above = tl.where(better & others, tl.exp((upper - top) * scale), 0.0)
        lower = tl.where(value > float("-inf"), value - slack, float("-inf"))
        below = tl.where(better | (drawn == ids), 0.0, tl.exp((lower - top) * scale))
        masses = buffers.masses + (row * tiles + tile) * 2
        tl.store(masses, tl.sum(above, 0))
        tl.store(masses + 1, tl.sum(below, 0))


@triton.jit
def members_kernel(  # type: ignore[no-untyped-def]
    questions, buffers, results, tiles, capacity, TILES: tl.constexpr
):
    """Takes back what a row has drawn where it may lie outside of the nucleus: its candidates are
    then of no use, as if there had been no room for them."""
    row = tl.program_id(0).to(tl.int64)
    if _asks(questions, row):
        level = tl.load(buffers.levels + row)
        certain = level > float("-inf")
        if certain:
            tile = tl.arange(0, TILES)
            masses = buffers.masses + (row * tiles + tile) * 2
            above = tl.sum(tl.load(masses, mask=tile < tiles, other=0.0).to(tl.float64), 0)
            below = tl.sum(tl.load(masses + 1, mask=tile < tiles, other=0.0).to(tl.float64), 0)
            asked = questions.reals + row * C_REALS
            top = tl.load(results.largest + row).to(tl.float64)
            distance = (level.to(tl.float64) - top) * tl.load(asked)
            total = above + below + tl.exp(distance)
            # Of an infinite bound neither holds.
            held = above < tl.load(asked + 4) * total - _MARGIN * total
            certain = held & (distance >= _FARTHEST)
        if certain == 0:
            tl.store(results.counts + row, capacity + 1)
            tl.store(results.drawn + row, -1)
