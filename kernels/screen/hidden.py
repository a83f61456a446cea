"""Hidden states as 16-bit integers, and what that and all later roundings can cost.

With a common direction ``m`` a hidden state is ``h = share m + r``; without one ``r = h``. Then
``r``, for a 1-bit tier turned by its rotation, is ``step values`` plus a loss. The step is as fine
as 16 bits (12 bits for a 1-bit tier, whose tables hold sums of four; 8 bits where int8 products are
worth more than a fine step) and the tier allow: sums of integer products must stay inside 32 bits,
so ``||values||`` stays below ``tier.hidden_limit``.

This is the form in torch, for all devices; `kernels.screen.hidden_cpu` is the fast one.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from lexshard.kernels.quantize.layout import BLOCK, SUMS
from lexshard.kernels.quantize.rotation import ROTATION_ERROR
from lexshard.kernels.quantize.tiers import COIN_UNIT, DitheredInt4Tier, Int8Tier, OneBitTier, Tier
from lexshard.kernels.rounding import UNIT_ROUNDOFF

LARGEST_INTEGER = 32767
LARGEST_EIGHT_BITS = 127
LARGEST_ROTATED = 2047  # a sum of four, and 8,192 more, is in two 7-bit halves
# One rounding to fp32, and every float64 rounding besides.
ROUNDING = UNIT_ROUNDOFF * 1.01
# The float64 roundings of a norm.
NORM_MARGIN = 1.0 + 1e-9
# Of the smallest step: sums of its integers stay inside 32 bits whatever the norm was rounded to.
STEP_MARGIN = 1.0 + 1e-6
# Above every underflow of a loss.
SMALLEST_LOSS = 2.0**-88
# What float64 roundings of the product with a centre may cost, per unit of its vectors.
CENTRE_ROUNDING = 1e-12
# Beyond this fp32 may overflow somewhere: no estimate, an infinite bound.
LARGEST_PRODUCT = 1e37


HiddenBits = Literal[8, 16]


class QuantizedHidden(NamedTuple):
    """N hidden states for the kernels of one tier: arrays on the CPU, tensors on a device."""

    values: Any  # [N, D] int16, or int8 where `HiddenBits` is 8, in the tier's order of columns
    starts: Any  # [N, D / 16] int32, see `dot_nibbles`; [N, 0] where there are no nibbles
    step: Any  # [N] float64
    share: Any  # [N] float64, how much of the common direction
    offset: Any  # [N] float64, the product with the centre of a 1-bit tier
    hidden_slack: Any  # [N, 2] float64, meets `row_slack` [2, V]


class TierVectors(NamedTuple):
    """What a tier does to hidden states, on their device; None where it does not."""

    direction: torch.Tensor | None  # [d] fp32
    coins: torch.Tensor | None  # [D] int16
    signs: torch.Tensor | None  # [D] fp32, and the rest of a rotation
    mixing: torch.Tensor | None  # [K, K] float64
    blocks: torch.Tensor | None  # [K, 128, 128] float64
    centre: torch.Tensor | None  # [d] fp32


def tier_vectors(tier: Tier, device: torch.device | str) -> TierVectors:
    def move(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    direction = None if tier.common is None else move(tier.common.vector)
    if isinstance(tier, OneBitTier):
        turn = tier.rotation
        blocks = move(turn.blocks).double()
        signs, mixing, centre = map(move, (turn.signs, turn.mixing, tier.centre))
        return TierVectors(direction, None, signs, mixing, blocks, centre)
    coins = move(tier.coins) if isinstance(tier, DitheredInt4Tier) else None
    return TierVectors(direction, coins, None, None, None, None)


def quantize_hidden(
    hidden: torch.Tensor, tier: Tier, vectors: TierVectors, bits: HiddenBits = 16
) -> QuantizedHidden:
    """``hidden`` [N, d] in the integers that ``tier`` multiplies, as tensors.

    ``vectors`` are the tier's on the device of ``hidden``. ``|estimate - canonical| <=
    hidden_slack @ row_slack``:

    - ``||r||``, or in a 1-bit tier the fourth root of the sum of ``||r_k||^4`` over turned blocks,
      meets the row's error bound;
    - the row's size meets ``||r - step values||``, one fp32 rounding each of the estimate, of the
      kept product with the common direction and of the canonical logit, and float64 roundings. In
      a 1-bit tier it also meets the error of turning ``r``, and what ``r`` still has along the
      common direction, which the rows have not.
    """
    exact = hidden.double()
    size = torch.linalg.vector_norm(exact, dim=1)
    share = leftover = torch.zeros_like(size)
    rest, along = exact, share
    if vectors.direction is not None:
        wide = vectors.direction.double()
        length = torch.linalg.vector_norm(wide)
        share = (exact @ wide / (length * length)).float().double()
        rest = exact - share[:, None] * wide
        along = share.abs() * length
        leftover = (rest @ wide).abs() / length
    norm = torch.linalg.vector_norm(rest, dim=1)
    usable = tier.largest_size * (size + norm + along) < LARGEST_PRODUCT
    share = torch.where(usable, share, 0.0)
    rest = torch.where(usable[:, None], rest, 0.0)
    factor, certain, offset = norm, torch.zeros_like(norm), torch.zeros_like(norm)
    if vectors.centre is not None:
        offset = rest @ vectors.centre.double()
        rest = _rotate(rest, vectors)
        squares = rest.reshape(len(rest), -1, BLOCK).square().sum(dim=2)
        factor = squares.square().sum(dim=1).sqrt().sqrt() + ROTATION_ERROR * norm
        certain = (
            ROTATION_ERROR * norm
            + leftover
            + ROUNDING * norm
            + CENTRE_ROUNDING * (norm + along + size)
        )
    columns = padded_columns(tier)
    peak = rest.abs().amax(dim=1)
    room = tier.hidden_limit - math.sqrt(columns) / 2.0 - 1.0  # rounding adds a half per column
    step = torch.maximum(peak / largest_integer(tier, bits), norm * STEP_MARGIN / room)
    step = torch.where(usable & (step > 0), step, 1.0)
    integers = torch.round(rest / step[:, None])
    approximation = step[:, None] * integers
    loss = torch.linalg.vector_norm(rest - approximation, dim=1)
    reached = torch.linalg.vector_norm(approximation, dim=1)
    roundings = ROUNDING * (reached + 2.0 * along + size)
    scaled = loss * NORM_MARGIN + roundings + SMALLEST_LOSS + certain
    slack = torch.stack([factor * NORM_MARGIN, torch.where(usable, scaled, torch.inf)], dim=1)
    values, starts = _arrange(integers, columns, tier, vectors.coins)
    values = values if bits == 16 else values.char()
    return QuantizedHidden(values, starts, step, share, offset, slack)


def _rotate(rest: torch.Tensor, vectors: TierVectors) -> torch.Tensor:
    """``rest`` [N, d] turned: [N, D]."""
    assert vectors.signs is not None
    assert vectors.mixing is not None
    assert vectors.blocks is not None
    padded = torch.nn.functional.pad(rest, (0, len(vectors.signs) - rest.shape[1]))
    mixed = vectors.mixing @ (padded * vectors.signs).reshape(len(rest), -1, BLOCK)
    turned = mixed.transpose(0, 1) @ vectors.blocks  # [K, N, 128]
    return turned.transpose(0, 1).reshape(len(rest), -1)


def _arrange(
    integers: torch.Tensor, columns: int, tier: Tier, coins: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers [N, d] as int16 [N, D] in the tier's order, and what sums start from."""
    count = len(integers)
    padded = torch.nn.functional.pad(integers, (0, columns - integers.shape[1]))
    if isinstance(tier, Int8Tier | OneBitTier):
        return padded.short(), torch.zeros(count, 0, dtype=torch.int32, device=integers.device)
    blocks = columns // BLOCK
    # A step is (half of a block, 16 bytes of 32, nibble); the order is half, nibble, bytes.
    values = padded.reshape(count, blocks, SUMS, 2, 2, 2, 2).permute(0, 1, 3, 5, 4, 2, 6)
    values = values.reshape(count, columns)
    if coins is None:
        starts = torch.zeros(count, blocks * SUMS, dtype=torch.int32, device=integers.device)
    else:
        shares = padded * (coins.double() * COIN_UNIT)
        starts = -torch.round(shares.reshape(count, blocks * SUMS, 16).sum(dim=2)).int()
    return values.short().contiguous(), starts


def largest_integer(tier: Tier, bits: HiddenBits = 16) -> int:
    """The largest integer a hidden state of this tier may hold.

    Raises ValueError for 8 bits and a tier that does not multiply bytes.
    """
    if bits == 8:
        if not isinstance(tier, Int8Tier):
            raise ValueError("only int8 tiers multiply 8-bit hidden states; leave hidden_bits out")
        return LARGEST_EIGHT_BITS
    return LARGEST_ROTATED if isinstance(tier, OneBitTier) else LARGEST_INTEGER


def padded_columns(tier: Tier) -> int:
    """The stored width D of a tier."""
    if isinstance(tier, Int8Tier):
        return tier.values.shape[1]
    if isinstance(tier, OneBitTier):
        return 8 * tier.signs.shape[1]
    return 2 * (tier.nibbles if isinstance(tier, DitheredInt4Tier) else tier.high).shape[1]
