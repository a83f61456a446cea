"""What an opening reads, when it is done, and how far it has come."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Head(NamedTuple):
    """Output rows by clusters. ``scale`` is above 0 and ``softcap`` 0 where there is none."""

    weight: npt.NDArray[Any]  # [V, d] fp32, or uint16 with bf16 bits
    bias: npt.NDArray[np.float32]  # [V], or [0]
    scale: np.float32
    softcap: float
    order: npt.NDArray[np.int32]  # [V], ascending within a cluster
    offsets: npt.NDArray[np.int64]  # [C + 1]


class Goal(NamedTuple):
    """When one row is done; ``U`` are the upper bounds of all that is not opened, ``s`` the inverse
    temperature, all logits adjusted:

    - GREEDY: every ``U`` is below the best known logit;
    - GUMBEL: every ``U s + largest noise of the cluster`` is below the best ``l s + noise``;
    - TOP_K: every ``U`` is below the k-th best known logit;
    - MIN_P: every ``U s`` is below ``l_max s + log_odds``, where ``log_odds`` is ``ln min_p``;
    - EPSILON: ``log sum |c| exp(U s) <= Z_S + log_odds``;
    - NUCLEUS: the same, and then the caller examines whether the set is certain (`EXAMINE`), again
      each time that the mass outside has fallen by a fifth.
    """

    kind: int
    k: int
    log_odds: float
    inverse_temperature: float


class Opening(NamedTuple):
    """How far the opening of one row has come; `advance` changes its arrays."""

    products: npt.NDArray[np.float32]  # [V] canonical products of known rows, without bias
    known: npt.NDArray[np.bool_]  # [V]
    heap_scores: npt.NDArray[np.float64]  # [C]
    heap_clusters: npt.NDArray[np.int32]  # [C]
    log_masses: npt.NDArray[np.float64]  # [C] ``ln |c| + U s``, or [0]
    noise: npt.NDArray[np.float32]  # [V], or [0]
    best: npt.NDArray[np.float32]  # [k] the k best known logits, a min-heap
    counts: npt.NDArray[np.int64]  # [3] clusters in the heap, rows known, clusters opened
    numbers: npt.NDArray[np.float64]  # [7] see `kernels.opening.cpu`

    @property
    def rows_known(self) -> int:
        return int(self.counts[1])

    @property
    def clusters_opened(self) -> int:
        return int(self.counts[2])

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The known tokens, ascending."""
        return np.flatnonzero(self.known).astype(np.int32)
