"""What drafting reads and writes: a draft model's output rows by cluster, and its sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Router(NamedTuple):
    """Which clusters a draft step looks at: ``W2 silu(W1 [embedding ; hidden before] + b1) + b2``
    (DynaSpec, section 4). ``kernels.linear.pack`` packs both matrices; h is a multiple of 16, and
    the outputs are padded to one."""

    inner: Floats  # [h / 16, 2 d, 16]
    inner_bias: Floats  # [h]
    outer: Floats  # [ceil(M / 16), h, 16]
    outer_bias: Floats  # [M]
    budgets: npt.NDArray[np.int32]  # [steps] clusters for draft step t; the last one from there on


class DraftHead(NamedTuple):
    """Output rows of a draft model in M clusters, each of whole panels of 16 rows, P in all.

    The rows of a cluster stand in the order of their ids. Full and static heads are one cluster.
    With a ``router`` a step looks at the clusters ``always`` and at the router's best; without one,
    at all.
    """

    panels: npt.NDArray[np.float32] | npt.NDArray[np.uint16]  # [P, d, 16] as `kernels.linear.pack`
    ids: npt.NDArray[np.int32]  # [16 P] vocabulary ids; -1 where a row only fills a panel up
    offsets: npt.NDArray[np.int32]  # [M + 1] in panels
    always: npt.NDArray[np.int32]  # [A] clusters, ascending
    router: Router | None = None
