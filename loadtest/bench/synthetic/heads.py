"""Output heads and hidden states of a stated geometry, for heads that are not at hand.

What a certificate costs depends on where the logits lie: rows are independent Gaussian directions
whose norms vary, hidden states a direction common to all and a few likely tokens whose logits are
set, which fall with the logarithm of their rank. A quarter of the contexts is flat: their best
logit is close to the crowd.
"""

from __future__ import annotations

import math

import torch

ROW_BLOCK = 8192  # rows generated at a time, in fp32
SMALLEST = 64  # rows and columns
LIKELY = 8  # tokens per hidden state whose logits are set
NORM_SPREAD = 0.1  # standard deviation of the logarithm of the row norms, which are 1 on average
# ``||h|| / sqrt(d)``, the standard deviation of the logits, and the share of its square that lies
# along a direction common to all hidden states.
SIZE, COMMON_SHARE = 1.8, 0.5
# The best logit, that of a flat context, how many are flat; and the one that those of rank 2 to 8,
# on a line over the logarithm of the rank, reach at rank 50.
BEST, FLAT_BEST, FLAT_SHARE, FIFTIETH = 12.0, 8.0, 0.25, 6.0


def synthetic_head(
    vocabulary: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """The rows of a head [V, d]; the arguments alone decide every bit.

    Raises ValueError for heads of fewer than 64 rows or columns.
    """
    if vocabulary < SMALLEST or columns < SMALLEST:
        raise ValueError(f"synthetic heads have at least {SMALLEST} rows and columns")
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(vocabulary, generator=generator, device=device)
    sizes = (NORM_SPREAD * values.clamp(-6, 6)).exp()
    norms = sizes / sizes.mean() / math.sqrt(columns)
    weight = torch.empty(vocabulary, columns, dtype=dtype, device=device)
    for first in range(0, vocabulary, ROW_BLOCK):
        stop = min(first + ROW_BLOCK, vocabulary)
        rows = torch.randn(stop - first, columns, generator=generator, device=device)
        weight[first:stop] = rows * norms[first:stop, None]
    return weight


def synthetic_hidden(weight: torch.Tensor, count: int, *, seed: int = 0) -> torch.Tensor:
    """``count`` hidden states [count, d] fp32 of a head, on its device."""
    (vocabulary, columns), device = weight.shape, weight.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(columns, generator=generator, dtype=torch.float64, device=device)

    length = SIZE * math.sqrt(columns)
    common = normal()
    common *= length * math.sqrt(COMMON_SHARE) / common.norm()
    ranks = torch.arange(1, LIKELY + 1, dtype=torch.float64, device=device)
    heights = ranks.log() / math.log(50)
    hidden = torch.empty(count, columns, device=device)
    flat = round(FLAT_SHARE * count)
    for row in range(count):
        best = FLAT_BEST if row < flat else BEST
        targets = best + (FIFTIETH - best) * heights
        ids = torch.randperm(vocabulary, generator=generator, device=device)[:LIKELY]
        likely = weight[ids].double()  # [8, d]
        basis, triangle = torch.linalg.qr(likely.T)  # [d, 8], [8, 8]
        missing = targets - likely @ common
        planted = basis @ torch.linalg.solve_triangular(triangle.T, missing[:, None], upper=False)
        rest = normal()
        rest -= basis @ (basis.T @ rest)  # what is left changes no logit that has been set
        hidden[row] = _lengthened(common + planted[:, 0], rest, length)
    order = torch.randperm(count, generator=generator, device=device)
    return hidden[order].contiguous()


def _lengthened(vector: torch.Tensor, rest: torch.Tensor, length: float) -> torch.Tensor:
    """``vector`` plus as much of ``rest`` as makes it ``length`` long, if it is not that long."""
    short = max(length**2 - float(vector @ vector), 0.0) / float(rest @ rest)
    along = float(vector @ rest) / float(rest @ rest)
    return vector + (math.sqrt(along**2 + short) - along) * rest
