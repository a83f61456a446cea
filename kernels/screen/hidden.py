"""Hidden states as 16-bit integers, and what that and all later roundings can cost.

With a common direction ``m`` a hidden state is ``h = share m + r``; without one ``r = h``. Then
``r`` is ``step values`` plus a loss. The step is as fine as 16 bits and the tier allow: sums of
integer products must stay inside 32 bits, so ``||values||`` stays below ``tier.hidden_limit``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernels.quantize.layout import BLOCK, SUMS
from kernels.quantize.tiers import COIN_UNIT, DitheredInt4Tier, Int8Tier, Tier

LARGEST_INTEGER = 32767
# Half a unit in the last place of fp32, and above every float64 rounding besides.
ROUNDING = 2.0**-24 * 1.01
# Beyond this fp32 may overflow somewhere: no estimate, an infinite bound.
LARGEST_PRODUCT = 1e37


class QuantizedHidden(NamedTuple):
    """N hidden states for the kernels of one tier."""

    values: torch.Tensor  # [N, D] int16, in the tier's order of columns
    starts: torch.Tensor  # [N, D / 16] int32, see `dot_nibbles`; [N, 0] for int8
    step: torch.Tensor  # [N] float64
    share: torch.Tensor  # [N] float64, how much of the common direction
    hidden_slack: torch.Tensor  # [N, 2] float64, meets `row_slack` [2, V]


def quantize_hidden(
    hidden: torch.Tensor,
    columns: int,
    tier: Tier,
    direction: torch.Tensor | None,
    coins: torch.Tensor | None,
) -> QuantizedHidden:
    """``hidden`` [N, d] in the integers that ``tier`` multiplies.

    ``columns`` is the tier's padded width D; ``direction`` [d] and ``coins`` [D] are the tier's on
    the device of ``hidden``. ``|estimate - canonical| <= hidden_slack @ row_slack``:

    - ``||r||`` meets the row's error norm;
    - the row's size meets ``||r - step values||``, one fp32 rounding each of the estimate, of the
      kept product with the common direction and of the canonical logit, and float64 roundings.
    """
    exact = hidden.double()
    size = torch.linalg.vector_norm(exact, dim=1)
    share = torch.zeros_like(size)
    rest, along = exact, share
    if direction is not None:
        wide = direction.double()
        length = torch.linalg.vector_norm(wide)
        share = (exact @ wide / (length * length)).float().double()
        rest = exact - share[:, None] * wide
        along = share.abs() * length
    norm = torch.linalg.vector_norm(rest, dim=1)
    peak = rest.abs().amax(dim=1)
    room = tier.hidden_limit - math.sqrt(columns) / 2.0 - 1.0  # rounding adds a half per column
    step = torch.maximum(peak / LARGEST_INTEGER, norm / room)
    usable = tier.largest_size * (size + norm + along) < LARGEST_PRODUCT
    step = torch.where(usable & (step > 0), step, 1.0)
    share = torch.where(usable, share, 0.0)
    rest = torch.where(usable[:, None], rest, 0.0)
    integers = torch.round(rest / step[:, None])
    approximation = step[:, None] * integers
    loss = torch.linalg.vector_norm(rest - approximation, dim=1)
    reached = torch.linalg.vector_norm(approximation, dim=1)
    scaled = loss * (1.0 + 1e-9) + ROUNDING * (reached + 2.0 * along + size) + 2.0**-88
    slack = torch.stack([norm * (1.0 + 1e-9), torch.where(usable, scaled, torch.inf)], dim=1)
    values, starts = _arrange(integers, columns, tier, coins)
    return QuantizedHidden(values, starts, step, share, slack)


def _arrange(
    integers: torch.Tensor, columns: int, tier: Tier, coins: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers [N, d] as int16 [N, D] in the tier's order, and what sums start from."""
    count = len(integers)
    padded = torch.nn.functional.pad(integers, (0, columns - integers.shape[1]))
    if isinstance(tier, Int8Tier):
        return padded.short(), torch.zeros(count, 0, dtype=torch.int32, device=integers.device)
    blocks = columns // BLOCK
    values = padded.reshape(count, blocks, SUMS, 8, 2).transpose(2, 3).reshape(count, columns)
    if coins is None:
        starts = torch.zeros(count, blocks * SUMS, dtype=torch.int32, device=integers.device)
    else:
        shares = padded * (coins.double() * COIN_UNIT)
        starts = -torch.round(shares.reshape(count, blocks * SUMS, 16).sum(dim=2)).int()
    return values.short().contiguous(), starts


def padded_columns(tier: Tier) -> int:
    """The stored width D of a tier."""
    if isinstance(tier, Int8Tier):
        return tier.values.shape[1]
    return 2 * (tier.nibbles if isinstance(tier, DitheredInt4Tier) else tier.high).shape[1]
