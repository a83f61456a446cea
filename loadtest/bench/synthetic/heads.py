"""Output heads and hidden states of a stated geometry, for heads that are not at hand.

What a certificate costs depends on where the logits lie, so every property that matters is a field
of `Geometry`, and `measure_geometry` reports what came out:

- rows: Gaussian directions, independent or in clusters of a given cosine; norms that vary;
- hidden states: a direction common to all, outlier channels, and a few likely tokens whose logits
  are set: they fall with the logarithm of their rank;
- some contexts are flat: their best logit is close to the crowd.

    head = synthetic_head(Geometry(), vocabulary=131_072, columns=1_024, seed=0)
    hidden = synthetic_hidden(head, count=64, seed=1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

ROW_BLOCK = 8192  # rows generated at a time, in fp32
SMALLEST = 64  # rows and columns
LIKELY = 8  # tokens per hidden state whose logits are set


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a synthetic head looks like. Row norms are 1 on average.

    ``cosine`` is that of two rows of one cluster (0: independent rows), ``cluster_rows`` how many
    share one. ``norm_spread`` is the standard deviation of the logarithm of the row norms; with
    ``heavy_tail`` they follow Student's t with 3 degrees of freedom instead of the normal law.
    ``bias_spread`` is the standard deviation of the biases (0: no bias).

    ``size`` is ``||h|| / sqrt(d)``, the standard deviation of the logits of independent rows; more
    where the likely tokens need it. A ``common_share`` of its square lies along a direction common
    to all hidden states. ``best``
    is the best logit without bias, in a ``flat_share`` of the contexts ``flat_best``; those of
    rank 2 to 8 lie on a line over the logarithm of the rank that reaches ``fiftieth`` at rank 50.
    ``outlier_channels`` columns of the hidden states are ``outlier_factor`` times as large and
    those of the weights as small: the logits stay.
    """

    cosine: float = 0.0
    cluster_rows: int = 64
    norm_spread: float = 0.1
    heavy_tail: bool = False
    bias_spread: float = 0.0
    size: float = 1.8
    common_share: float = 0.5
    best: float = 12.0
    fiftieth: float = 6.0
    flat_share: float = 0.25
    flat_best: float = 8.0
    outlier_channels: int = 0
    outlier_factor: float = 30.0


NAMED = {
    "independent": Geometry(),
    "clustered": Geometry(cosine=0.5),
    "heavy-tailed": Geometry(norm_spread=0.15, heavy_tail=True),
    "outliers": Geometry(outlier_channels=4),
    "flat": Geometry(flat_share=1.0),
}


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticHead:
    """Weights [V, d] in fp32 or bf16, perhaps a bias [V] fp32, and what they were made with."""

    geometry: Geometry
    weight: torch.Tensor
    bias: torch.Tensor | None
    outliers: npt.NDArray[np.int64] = field(repr=False)  # columns


@dataclass(frozen=True, slots=True)
class HeadStatistics:
    """What a head and hidden states turned out to be: medians over rows or hidden states."""

    row_norm: float
    largest_row_norm: float
    hidden_norm: float
    best: float
    fiftieth: float
    deviation: float  # of all logits of one hidden state
    smallest_gap: float  # between best and 50th logit of any hidden state

    def __str__(self) -> str:
        return (
            f"||W|| {self.row_norm:.2f} (largest {self.largest_row_norm:.2f}), ||h|| "
            f"{self.hidden_norm:.1f}, best logit {self.best:.1f}, 50th {self.fiftieth:.1f}, "
            f"deviation {self.deviation:.2f}, flattest context {self.smallest_gap:.1f} from best "
            "to 50th"
        )


def synthetic_head(
    geometry: Geometry,
    vocabulary: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> SyntheticHead:
    """Generate the rows of a head; the arguments alone decide every bit.

    Raises ValueError for a cosine outside 0 .. 1 and for heads of fewer than 64 rows or columns.
    """
    if not 0 <= geometry.cosine <= 1:
        raise ValueError(f"cosine {geometry.cosine} is not between 0 and 1")
    if vocabulary < SMALLEST or columns < SMALLEST:
        raise ValueError(f"synthetic heads have at least {SMALLEST} rows and columns")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(vocabulary, columns, dtype=dtype)
    clusters = -(-vocabulary // geometry.cluster_rows)
    centres = torch.empty(0)
    if geometry.cosine:
        centres = torch.randn(clusters, columns, generator=generator)
    norms = _norms(geometry, vocabulary, generator) / math.sqrt(columns)
    outliers = torch.randperm(columns, generator=generator)[: geometry.outlier_channels]
    for first in range(0, vocabulary, ROW_BLOCK):
        stop = min(first + ROW_BLOCK, vocabulary)
        rows = torch.randn(stop - first, columns, generator=generator)
        if geometry.cosine:
            own = centres[torch.arange(first, stop) // geometry.cluster_rows]
            rows = math.sqrt(geometry.cosine) * own + math.sqrt(1 - geometry.cosine) * rows
        rows *= norms[first:stop, None]
        rows[:, outliers] /= geometry.outlier_factor
        weight[first:stop] = rows
    bias = None
    if geometry.bias_spread:
        bias = torch.randn(vocabulary, generator=generator) * geometry.bias_spread
    return SyntheticHead(geometry, weight, bias, outliers.numpy())


def synthetic_hidden(head: SyntheticHead, count: int, *, seed: int = 0) -> torch.Tensor:
    """``count`` hidden states [count, d] fp32 of a head: see `Geometry`."""
    geometry, weight = head.geometry, head.weight
    vocabulary, columns = weight.shape
    generator = torch.Generator().manual_seed(seed)
    length = geometry.size * math.sqrt(columns)
    common = torch.randn(columns, generator=generator, dtype=torch.float64)
    common *= length * math.sqrt(geometry.common_share) / common.norm()
    heights = torch.arange(1, LIKELY + 1, dtype=torch.float64).log() / math.log(50)
    hidden = torch.empty(count, columns)
    flat = round(geometry.flat_share * count)
    for row in range(count):
        best = geometry.flat_best if row < flat else geometry.best
        targets = best + (geometry.fiftieth - best) * heights
        ids = torch.randperm(vocabulary, generator=generator)[:LIKELY]
        likely = weight[ids].double()  # [8, d]
        likely[:, head.outliers] *= geometry.outlier_factor
        basis, triangle = torch.linalg.qr(likely.T)  # [d, 8], [8, 8]
        missing = targets - likely @ common
        planted = basis @ torch.linalg.solve_triangular(triangle.T, missing[:, None], upper=False)
        rest = torch.randn(columns, generator=generator, dtype=torch.float64)
        rest -= basis @ (basis.T @ rest)  # what is left changes no logit that has been set
        hidden[row] = _lengthened(common + planted[:, 0], rest, length)
    order = torch.randperm(count, generator=generator)
    hidden[:, head.outliers] *= geometry.outlier_factor
    return hidden[order].contiguous()


def _lengthened(vector: torch.Tensor, rest: torch.Tensor, length: float) -> torch.Tensor:
    """``vector`` plus as much of ``rest`` as makes it ``length`` long, if it is not that long."""
    short = max(length**2 - float(vector @ vector), 0.0) / float(rest @ rest)
    along = float(vector @ rest) / float(rest @ rest)
    return vector + (math.sqrt(along**2 + short) - along) * rest


def measure_geometry(weight: torch.Tensor, hidden: torch.Tensor) -> HeadStatistics:
    """What the logits of ``hidden`` [N, d] without bias are like."""
    norms, logits = [], []
    for rows in weight.split(ROW_BLOCK):
        wide = rows.float()
        norms.append(wide.norm(dim=1))
        logits.append(hidden @ wide.T)
    every = torch.cat(logits, dim=1)
    lengths = torch.cat(norms)
    top = every.topk(50, dim=1).values
    return HeadStatistics(
        row_norm=float(lengths.median()),
        largest_row_norm=float(lengths.max()),
        hidden_norm=float(hidden.norm(dim=1).median()),
        best=float(top[:, 0].median()),
        fiftieth=float(top[:, -1].median()),
        deviation=float(every.std(dim=1).median()),
        smallest_gap=float((top[:, 0] - top[:, -1]).min()),
    )


def _norms(geometry: Geometry, count: int, generator: torch.Generator) -> torch.Tensor:
    """Row norms [count] with mean 1."""
    values = torch.randn(count, generator=generator)
    if geometry.heavy_tail:
        values /= (torch.randn(count, 3, generator=generator).square().sum(dim=1) / 3).sqrt()
    sizes = (geometry.norm_spread * values.clamp(-6, 6)).exp()
    return sizes / sizes.mean()
