"""Everything that certificates are made of, for a batch of rows at once."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.certify import cpu, reference
from kernels.certify.margins import LARGEST_VOCABULARY

Implementation = Literal["reference", "cpu"]


class Questions(NamedTuple):
    """What N rows are certified for."""

    k: Any  # [N] int64, at least 1
    inverse_temperature: Any  # [N] float64, above 0
    top_p: Any  # [N] float64, 0 <= p < 1


class Evidence(NamedTuple):
    """Numbers of N rows; arrays, or tensors on the device of what was measured.

    Top-k holds where ``largest_outside < threshold`` (or is ``-inf``); epsilon and coverage are
    comparisons of the log masses (`within_odds`); the nucleus is certain where its size is not -1.
    """

    threshold: Any  # [N] fp32, the k-th largest known logit, -inf where there are fewer
    largest_outside: Any  # [N] fp32, the largest upper bound of what is not known
    known_log_mass: Any  # [N] float64, rounded down
    outside_log_mass: Any  # [N] float64, rounded up
    nucleus_size: Any  # [N] int64


def gather_evidence(
    known: Any,
    outside_upper: Any,
    sizes: Any,
    questions: Questions,
    *,
    implementation: Implementation | None = None,
) -> Evidence:
    """The evidence of rows whose logits ``known`` [N, M] fp32 are exact (padded with ``-inf``) and
    all of whose other tokens lie in clusters of ``sizes`` [N, C] int64 below ``outside_upper``
    [N, C] fp32. Clusters of size 0 do not count.

    See `known_log_mass`, `outside_log_mass` and `nucleus_certificate` (without a lower bound of the
    mass outside) for what the numbers mean. CUDA tensors are measured on their device, without
    synchronising.
    """
    if getattr(known, "is_cuda", False):
        from kernels.certify import triton_kernel

        return triton_kernel.gather_evidence(known, outside_upper, sizes, questions)
    module: Any = reference if implementation == "reference" else cpu
    rows = []
    for row in range(len(known)):
        scale = float(questions.inverse_temperature[row])
        own = np.ascontiguousarray(known[row], np.float32)
        upper = np.ascontiguousarray(outside_upper[row], np.float32)
        counts = np.ascontiguousarray(sizes[row], np.int64)
        outside = module.outside_log_mass(upper, counts, scale)
        largest = float(upper.max(initial=-math.inf, where=counts > 0))
        size = module.nucleus_size(
            own, scale, questions.top_p[row], outside, -math.inf, largest, LARGEST_VOCABULARY
        )
        threshold = module.kth_largest(own, int(questions.k[row]))
        rows.append((threshold, largest, module.known_log_mass(own, scale), outside, size))
    columns: list[tuple[Any, ...]] = list(zip(*rows, strict=True)) or [()] * 5
    types: list[npt.DTypeLike] = [np.float32, np.float32, np.float64, np.float64, np.int64]
    return Evidence(
        *(np.array(column, dtype) for column, dtype in zip(columns, types, strict=True))
    )
