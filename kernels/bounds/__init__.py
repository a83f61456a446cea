"""Upper bounds of the logits of whole clusters: what CSV-Decode prunes with, rounded outward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.bounds import reference
from lexshard.kernels.bounds.clusters import Clusters, recentre, remaining_bias, summarise
from lexshard.kernels.bounds.query import measure

if TYPE_CHECKING:
    from lexshard.kernels.bounds.triton_kernel import DeviceClusters

Kind = Literal["ball", "cone", "best"]
Implementation = Literal["reference", "cpu"]

__all__ = ["Clusters", "Kind", "cluster_bounds", "recentre", "remaining_bias", "summarise"]


def cluster_bounds(
    hidden: npt.NDArray[np.float32] | torch.Tensor,
    clusters: Clusters | DeviceClusters,
    *,
    kind: Kind,
    largest_bias: npt.NDArray[np.float32] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Per hidden state and cluster an upper bound of every canonical logit with bias: [N, C] fp32.

    ``hidden`` [N, d] fp32. With ``mu``, ``R``, ``u``, ``theta`` of a cluster, ``n`` its largest
    norm where the cosine is positive and its smallest where it is negative, and ``phi`` the angle
    between ``h`` and ``u``:

    - ball: ``<mu, h> + R ||h|| + b`` (CSV-Decode eq. 13);
    - cone: ``||h|| n cos(max(0, phi - theta)) + b`` (eq. 14 as printed leaves out ``phi``);
    - best: the smaller of the two.

    ``b`` is the cluster's largest bias, or ``largest_bias`` [C] or [N, C] where given (see
    `remaining_bias`). The bound is at least ``fp32(canonical + bias)`` of every row, before scale,
    soft-cap and penalties, which are monotone: callers apply them. It includes every rounding, of
    its own and of the canonical logit. Where something overflows it is ``+inf``; never NaN. Empty
    clusters have ``-inf``.

    Clusters placed on a CUDA device (`kernels.bounds.triton_kernel.place`) give a tensor there.
    Raises `ValueError` for shapes that do not fit and, on the CPU, for NaN or infinity.
    """
    if kind not in ("ball", "cone", "best"):
        raise ValueError(f"bounds are 'ball', 'cone' or 'best', not {kind!r}")
    if not isinstance(clusters, Clusters):
        from lexshard.kernels.bounds import triton_kernel

        return triton_kernel.cluster_bounds(
            torch.as_tensor(hidden), clusters, kind=kind, largest_bias=largest_bias
        )
    query = measure(hidden, clusters)
    shape = (len(query.hidden), len(clusters.radius))
    bias = clusters.bias_values[:, 0] if largest_bias is None else largest_bias
    biases = np.broadcast_to(np.asarray(bias, np.float32), shape)
    if implementation == "reference":
        return reference.cluster_bounds(query, clusters, kind, biases)
    from lexshard.kernels.bounds import cpu  # numba compiles on first use; keep the import cheap

    return cpu.cluster_bounds(query, clusters, kind, biases)
