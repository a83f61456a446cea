"""The bounds in Triton: canonical dot products, then one program per row and 128 clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from lexshard.kernels.bounds.clusters import Clusters
from lexshard.kernels.bounds.query import (
    COSINE_ROUNDING,
    DOT_ROUNDING,
    FLUSHED,
    TRIGONOMETRY_ROUNDING,
    depth,
)
from lexshard.kernels.rounding import SMALLEST_STEP
from lexshard.kernels.rows import triton_kernel as rows

CLUSTERS = 128


@dataclass(frozen=True, slots=True, eq=False)
class DeviceClusters:
    """What the bounds read of `Clusters`, on a device."""

    centroid: torch.Tensor  # [C, d] fp32
    direction: torch.Tensor  # [C, d] fp32
    # [6, C] float64: radius, largest and smallest norm, cosine and sine of the angular radius, bias
    extent: torch.Tensor


def place(clusters: Clusters, device: torch.device | str) -> DeviceClusters:
    """``clusters`` on a device, for `kernels.bounds.cluster_bounds`."""

    def move(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    # Angles become their cosines here: a device's trigonometry may differ in the last place.
    angle = torch.from_numpy(clusters.angular_radius).double()
    extent = [
        torch.from_numpy(clusters.radius).double(),
        torch.from_numpy(clusters.largest_norm).double(),
        torch.from_numpy(clusters.smallest_norm).double(),
        angle.cos(),
        angle.sin(),
        torch.from_numpy(clusters.bias_values[:, 0].copy()).double(),
    ]
    return DeviceClusters(
        move(clusters.centroid), move(clusters.direction), torch.stack(extent).to(device)
    )


@triton.jit
def _with_bias(raw, bias):  # type: ignore[no-untyped-def]
    result = raw.to(tl.float32) + bias
    return tl.where(result == result, result, float("inf"))


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    ball_dots,
    cone_dots,
    norms,
    extent,
    bias,
    result,
    count,
    bias_stride,
    rounding,
    BALL: tl.constexpr,
    CONE: tl.constexpr,
    CLUSTERS: tl.constexpr,
    DOT: tl.constexpr,
    COSINE: tl.constexpr,
    TINY_DOT: tl.constexpr,
    TRIGONOMETRY: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = tl.program_id(1)
    cluster = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    inside = cluster < count
    norm = tl.load(norms + row)
    depth = tl.load(rounding)
    largest = tl.load(extent + count + cluster, mask=inside, other=0.0)
    largest_bias = tl.load(bias + row * bias_stride + cluster, mask=inside, other=0.0)
    bound = tl.full((CLUSTERS,), float("inf"), tl.float32)
    if BALL:
        dot = tl.load(ball_dots + row * count + cluster, mask=inside, other=0.0).to(tl.float64)
        radius = tl.load(extent + cluster, mask=inside, other=0.0)
        slack = tl.abs(dot) * DOT + (radius + largest) * norm * depth
        raw = dot + radius * norm + (slack + SMALLEST)
        finite = tl.abs(dot) < float("inf")
        bound = tl.where(finite, _with_bias(raw, largest_bias), bound)
    if CONE:
        dot = tl.load(cone_dots + row * count + cluster, mask=inside, other=0.0).to(tl.float64)
        smallest = tl.load(extent + 2 * count + cluster, mask=inside, other=0.0)
        cosine_theta = tl.load(extent + 3 * count + cluster, mask=inside, other=0.0)
        sine_theta = tl.load(extent + 4 * count + cluster, mask=inside, other=0.0)
        one = tl.full((CLUSTERS,), 1.0, tl.float64)
        length = tl.where(norm > 0.0, norm, 1.0)
        inverse = tl.where(norm > 0.0, 1.0 / length, 0.0)
        cosine = dot * inverse + (COSINE + depth + TINY_DOT * inverse)
        cosine = tl.minimum(tl.maximum(cosine, -one), one)
        sine = tl.sqrt((1.0 - cosine) * (1.0 + cosine))
        closest = cosine * cosine_theta + sine * sine_theta + TRIGONOMETRY
        closest = tl.where(cosine >= cosine_theta, one, tl.minimum(closest, one))
        row_norm = tl.where(closest > 0.0, largest, smallest)
        slack = largest * norm * depth + SMALLEST
        cone = _with_bias(norm * row_norm * closest + slack, largest_bias)
        finite = tl.abs(dot) < float("inf")
        bound = tl.where(finite, tl.minimum(bound, cone), bound)
    tl.store(result + row * count + cluster, bound, mask=inside)


def cluster_bounds(
    hidden: torch.Tensor,
    clusters: DeviceClusters,
    *,
    kind: str,
    largest_bias: Any = None,
) -> torch.Tensor:
    """`kernels.bounds.cluster_bounds` on the device of ``clusters``; values are not checked."""
    device = clusters.extent.device
    states = hidden.to(device=device, dtype=torch.float32).contiguous()
    count, columns = clusters.centroid.shape
    exact = states.double()
    norm = torch.linalg.vector_norm(exact, dim=1) * (1.0 + (columns + 8) * 2.0**-52)
    ball, cone = kind != "cone", kind != "ball"
    ball_dots = rows.canonical_logits(states, clusters.centroid, None, None) if ball else norm
    cone_dots = rows.canonical_logits(states, clusters.direction, None, None) if cone else norm
    bias = clusters.extent[5] if largest_bias is None else torch.as_tensor(largest_bias)
    bias = bias.to(device=device, dtype=torch.float32).contiguous()
    result = torch.empty(len(states), count, dtype=torch.float32, device=device)
    # float64 on the device: a Python number would arrive as fp32.
    rounding = torch.tensor([depth(columns)], dtype=torch.float64, device=device)
    if result.numel():
        _kernel[(triton.cdiv(count, CLUSTERS), len(states))](
            ball_dots,
            cone_dots,
            norm,
            clusters.extent,
            bias,
            result,
            count,
            count if bias.ndim == 2 else 0,
            rounding,
            BALL=ball,
            CONE=cone,
            CLUSTERS=CLUSTERS,
            DOT=DOT_ROUNDING,
            COSINE=COSINE_ROUNDING,
            TINY_DOT=SMALLEST_STEP,
            TRIGONOMETRY=TRIGONOMETRY_ROUNDING,
            SMALLEST=FLUSHED,
            enable_fp_fusion=False,
        )
    return result
