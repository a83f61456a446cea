"""The whole softmax in Triton: where the tokens of rows lie, and bounds on those not chosen.

What `kernels.mass` does of estimates on a host. Sums have one place each or are of integers, so
that nothing depends on scheduling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.mass.reference import BIN_WIDTH, BINS, LARGEST_PLACE
from lexshard.kernels.search.gpu.triton_bounds import C_REALS, C_TILE, raised, slack_of

BINS_ROOM = triton.next_power_of_2(BINS + 1)
# Errors are counted in units of 2**-16, and beyond 2**20 nothing is certified by them.
ERROR_UNITS, LARGEST_ERROR = 2.0**16, 2.0**20

_BINS = tl.constexpr(BINS)
_BINS_ROOM = tl.constexpr(BINS_ROOM)
_BINS_PER_UNIT = tl.constexpr(1.0 / BIN_WIDTH)
_LARGEST_PLACE = tl.constexpr(float(LARGEST_PLACE))
_ERROR_UNITS = tl.constexpr(ERROR_UNITS)
_LARGEST_ERROR = tl.constexpr(LARGEST_ERROR)


@triton.jit
def _bin_of(value, reals, row):  # type: ignore[no-untyped-def]
    """The number of the bin of an adjusted estimate, int64; that of the lowest for -inf."""
    place = value.to(tl.float64) * (tl.load(reals + row * C_REALS) * _BINS_PER_UNIT)
    place = tl.minimum(tl.maximum(place, -_LARGEST_PLACE), _LARGEST_PLACE)
    return tl.floor(place).to(tl.int64)


@triton.jit
def _best_of(softmax, row, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.arange(0, TILES)
    tops = softmax.tops + row * softmax.tiles
    return tl.max(tl.load(tops + tile, mask=tile < softmax.tiles, other=float("-inf")), 0)


@triton.jit
def _values_of(softmax, row, tile):  # type: ignore[no-untyped-def]
    """The ids of a tile, which of them there are, and their estimates."""
    ids = tile * C_TILE + tl.arange(0, C_TILE)
    inside = ids < softmax.screened.size
    values = softmax.screened.estimates + row * softmax.screened.width
    return ids, inside, tl.load(values + ids, mask=inside, other=float("-inf"))


@triton.jit
def tops_kernel(softmax):  # type: ignore[no-untyped-def]
    """The best estimate of every tile."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, value = _values_of(softmax, row, tile)
    tl.store(softmax.tops + row * softmax.tiles + tile, tl.max(value, 0))


@triton.jit
def outline_kernel(softmax, counts, errors, widest, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Per bin below the best estimate's how many tokens there are and their slack times s, for
    which a tile's tokens are taken to be alike; the largest slack. Adds to zeros."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids, inside, value = _values_of(softmax, row, tile)
    reals = softmax.reals
    below = _bin_of(_best_of(softmax, row, TILES), reals, row) - _bin_of(value, reals, row)
    near = (value > float("-inf")) & (below < _BINS)
    slack = slack_of(softmax.screened, value, softmax.factors, row, ids, inside)
    scaled = slack.to(tl.float64) * tl.load(reals + row * C_REALS)
    scaled = tl.where(near, tl.minimum(scaled, _LARGEST_ERROR), 0.0)
    found = tl.histogram(tl.where(near, below, _BINS).to(tl.int32), _BINS_ROOM)
    members = tl.maximum(tl.sum(near.to(tl.int32), 0), 1)
    each = (tl.sum(scaled, 0) / members * _ERROR_UNITS).to(tl.int64)
    place = tl.arange(0, _BINS_ROOM)
    some = (found > 0) & (place < _BINS)
    tl.atomic_add(counts + row * _BINS + place, found, mask=some)
    tl.atomic_add(errors + row * _BINS + place, found.to(tl.int64) * each, mask=some)
    tl.atomic_max(widest + row, (tl.max(scaled, 0) * _ERROR_UNITS).to(tl.int64))


@triton.jit
def bounds_kernel(  # type: ignore[no-untyped-def]
    softmax, lowest, tile_counts, uppers, lowers, largest, TILES: tl.constexpr
):
    """Per tile how many tokens lie in bin ``lowest`` or above, and of all others the sums of exp of
    upper and of lower bounds times s, less the best estimate's, and the largest upper bound."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids, inside, value = _values_of(softmax, row, tile)
    reals = softmax.reals
    chosen = (value > float("-inf")) & (_bin_of(value, reals, row) >= tl.load(lowest + row))
    outside = inside & (chosen == 0)
    slack = slack_of(softmax.screened, value, softmax.factors, row, ids, inside)
    lower = tl.where(slack < float("inf"), value - slack, float("-inf"))
    upper = tl.where(outside, raised(value, slack), float("-inf"))
    lower = tl.where(outside, lower, float("-inf"))
    scale = tl.load(reals + row * C_REALS)
    best = _best_of(softmax, row, TILES).to(tl.float64) * scale
    place = row * softmax.tiles + tile
    tl.store(tile_counts + place, tl.sum(chosen.to(tl.int32), 0))
    tl.store(uppers + place, tl.sum(tl.exp(upper.to(tl.float64) * scale - best), 0))
    tl.store(lowers + place, tl.sum(tl.exp(lower.to(tl.float64) * scale - best), 0))
    tl.store(largest + place, tl.max(upper, 0))


@triton.jit
def chosen_kernel(  # type: ignore[no-untyped-def]
    softmax, lowest, tile_counts, chosen, counts, room, TILES: tl.constexpr
):
    """The tokens in bin ``lowest`` or above, sorted by id; there is room for all of them."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    own = tl.load(tile_counts + row * softmax.tiles + tile)
    place = tl.arange(0, TILES)
    earlier = tl.load(tile_counts + row * softmax.tiles + place, mask=place < tile, other=0)
    before = tl.sum(earlier, 0)
    if tile == softmax.tiles - 1:
        tl.store(counts + row, before + own)
    if own > 0:
        ids, _, value = _values_of(softmax, row, tile)
        bins = _bin_of(value, softmax.reals, row)
        keep = (value > float("-inf")) & (bins >= tl.load(lowest + row))
        rank = before + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(chosen + row * room + rank, ids, mask=keep & (rank < room))
