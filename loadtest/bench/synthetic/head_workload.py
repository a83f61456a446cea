"""What head benchmarks measure on: heads with hidden states, and what each row asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.draw import draw
from lexshard.kernels.rows import canonical_logits
from lexshard.loadtest.bench.synthetic.heads import synthetic_head, synthetic_hidden

STATES = 96  # hidden states of a synthetic head; twice as many for calibration and measurement
# Ways to choose tokens, as a row asks a head for them: all but greedy at temperature 1.
SAMPLING_METHODS = {
    "greedy": Need("top1"),
    "gumbel": Need("top1", inverse_temperature=1.0),
    "top50": Need("topk", k=50, inverse_temperature=1.0),
    "minp": Need("minp", min_p=0.05, inverse_temperature=1.0),
}


def needs(method: Need, batch: int, step: int) -> list[Need]:
    """What ``batch`` rows of different keys ask in a step."""
    return [replace(method, key=key, position=step) for key in range(batch)]


def draw_from_all(logits: npt.NDArray[np.float32], asked: Sequence[Need]) -> npt.NDArray[np.int64]:
    """The tokens [B] that rows draw from the logits [B, V] of every token."""
    rows, size = logits.shape
    ids = np.tile(np.arange(size, dtype=np.int32), rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * size
    return draw(ids, logits.reshape(-1), offsets, RowTable.of(asked).controls)


@dataclass(frozen=True, slots=True, eq=False)
class HeadWorkload:
    """A head and two disjoint sets of hidden states: one to choose tiers by, one to measure."""

    weight: torch.Tensor  # [V, d] fp32 or bf16
    calibration: npt.NDArray[np.float32]  # [M, d]
    hidden: npt.NDArray[np.float32]  # [M, d]

    def logits(self, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The canonical logits [N, V] of hidden states [N, d]."""
        return canonical_logits(hidden, self.weight)

    def states(self, step: int, batch: int) -> npt.NDArray[np.float32]:
        """The hidden states [batch, d] of a step; later steps take the following ones."""
        places = (np.arange(batch) + step * batch) % len(self.hidden)
        return np.ascontiguousarray(self.hidden[places])


def synthetic_workload(
    vocabulary: int, columns: int, dtype: torch.dtype, seed: int
) -> HeadWorkload:
    """A head of `synthetic.heads`."""
    weight = synthetic_head(vocabulary, columns, dtype=dtype, seed=seed)
    hidden = synthetic_hidden(weight, 2 * STATES, seed=seed + 1).numpy()
    return HeadWorkload(weight, calibration=hidden[:STATES], hidden=hidden[STATES:])
