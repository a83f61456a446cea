"""What all launches of the search in Triton share: what they read, bounds of tokens, their noise.

The search is a fixed sequence of launches with fixed buffers; the host reads no value on the way.

Ids come in blocks of 64, those of the noise, and blocks in tiles of 16. A launch either visits all
ids once (`summary_kernel`) or decides from per-block figures which ids it must visit. Everything
is written to places that depend on ids alone, so results do not depend on scheduling.

Arithmetic that decides (bounds, thresholds) is fp32 or float64 without fused multiply-adds.

Ids number the rows that are searched. ``OWNED`` says which tokens of the vocabulary they are, by
whose ids noise is drawn: the same (0), or ``token_ids``, of which every 64 are a block of the
vocabulary (1) or not (2): then no block has a bound on its noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.noise.triton_kernel import block_draw, gumbel_in_block, gumbel_of
from lexshard.kernels.rounding import NOISE_ROUNDING, ULP_SHARE
from lexshard.kernels.search import types as kinds
from lexshard.kernels.search.gpu.triton_adjust import ENTRY, REALS, TILE

ALL_TOKENS, WHOLE_BLOCKS, ANY_TOKENS = 0, 1, 2  # what `OWNED` says
IDLE = -1  # the kind of a row that asks for nothing
FEW = 4  # leaders of a row that wants one token: the best estimate need not be the best logit
INTEGERS = 5  # kind, k, low and high half of the key, position

C_GREEDY = tl.constexpr(kinds.GREEDY)
C_GUMBEL = tl.constexpr(kinds.GUMBEL)
C_TOP_K = tl.constexpr(kinds.TOP_K)
C_FEW = tl.constexpr(FEW)
C_BLOCK = tl.constexpr(BLOCK)
C_TILE = tl.constexpr(TILE)
C_TILE_BLOCKS = tl.constexpr(TILE // BLOCK)
C_INTEGERS = tl.constexpr(INTEGERS)
C_REALS = tl.constexpr(REALS)
C_ENTRY = tl.constexpr(ENTRY)
C_ULP_SHARE = tl.constexpr(float(ULP_SHARE))
C_NOISE_ROUNDING = tl.constexpr(NOISE_ROUNDING)
C_EXACT_SOFTCAP_ERROR = tl.constexpr(2.0**-40)


class Questions(NamedTuple):
    """What the rows ask, as `kernels.search.gpu` reads it; IDLE rows ask nothing."""

    integers: torch.Tensor  # [N, 5] int64: kind, k, low and high half of the key, position
    reals: torch.Tensor  # [N, 9] float64: see `triton_adjust.REALS`


class EstimatedRows(NamedTuple):
    """Estimates of N rows over ``size`` ids and what their errors are made of
    (`kernels.screen.Screened`)."""

    estimates: torch.Tensor  # [N, width] fp32
    row_slack: torch.Tensor  # [2, slack_width] fp32
    hidden_slack: torch.Tensor  # [N, slack_terms] float64
    size: int
    width: int
    slack_width: int
    slack_terms: int


class BlockDraws(NamedTuple):
    """The noise of blocks of ids."""

    token_ids: torch.Tensor  # [size] int32 as ``OWNED`` says, or anything where it is 0
    smallest: torch.Tensor  # [N, blocks] float64, the smallest exponential of each
    winners: torch.Tensor  # [N, blocks] int32, which of a block's ids has it
    size: int
    blocks: int


@triton.jit
def slack_by(screened, value, error, size, rest, ids, inside):  # type: ignore[no-untyped-def]
    """How far canonical logits may lie from estimates by the factors of a row, fp32."""
    errors = tl.load(screened.row_slack + ids, mask=inside, other=0.0)
    sizes = tl.load(screened.row_slack + screened.slack_width + ids, mask=inside, other=0.0)
    return error * errors + size * sizes + rest + tl.abs(value) * C_ULP_SHARE


@triton.jit
def slack_of(screened, value, factors, row, ids, inside):  # type: ignore[no-untyped-def]
    """`slack_by` of a row whose factors are stored."""
    error = tl.load(factors + row * 3)
    size = tl.load(factors + row * 3 + 1)
    rest = tl.load(factors + row * 3 + 2)
    return slack_by(screened, value, error, size, rest, ids, inside)


@triton.jit
def raised(value, slack):  # type: ignore[no-untyped-def]
    """Upper bounds in fp32; excluded ids stay at -inf."""
    upper = tl.where(slack < float("inf"), value + slack, float("inf"))
    return tl.where(value > float("-inf"), upper, float("-inf"))


@triton.jit
def scale_of(questions, row):  # type: ignore[no-untyped-def]
    """What a row multiplies its logits with before it compares them, float64."""
    kind = tl.load(questions.integers + row * C_INTEGERS)
    scale = tl.load(questions.reals + row * C_REALS)
    return tl.where((kind == C_GREEDY) | (kind == C_TOP_K), 1.0, scale)


@triton.jit
def draw_blocks(questions, row, block, draws, OWNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest exponential and the winning offset of each block of 64 ids."""
    number = block
    if OWNED == 1:
        first = block * C_BLOCK
        number = tl.load(draws.token_ids + first, mask=first < draws.size, other=0) // C_BLOCK
    asked = questions.integers + row * C_INTEGERS
    low, high, position = tl.load(asked + 2), tl.load(asked + 3), tl.load(asked + 4)
    return block_draw(number.to(tl.uint32), low, high, position)


@triton.jit
def noise_of(questions, row, ids, draws, OWNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gumbel noise of int32 ids, float64; that of their blocks is drawn already, if they have
    any."""
    tokens, inside = ids, ids < draws.size
    if OWNED > 0:
        tokens = tl.load(draws.token_ids + ids, mask=inside, other=0)
    asked = questions.integers + row * C_INTEGERS
    low, high, position = tl.load(asked + 2), tl.load(asked + 3), tl.load(asked + 4)
    if OWNED == 2:
        noise = gumbel_of(tokens, low, high, position)
    else:
        place = row * draws.blocks + ids // C_BLOCK
        smallest = tl.load(draws.smallest + place, mask=inside, other=1.0)
        winner = tl.load(draws.winners + place, mask=inside, other=0).to(tl.uint32)
        noise = gumbel_in_block(tokens, smallest, winner, low, high, position)
    return noise.to(tl.float64)
