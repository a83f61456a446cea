"""What rows are to be certified for: needs of every kind, with all their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lexshard.actors.messages import NUCLEUS_NEEDS
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.draw import Controls
from lexshard.kernels.noise import gumbel_row
from tests.support.certificate_heads import Array
from tests.support.search_cases import random_adjustment

KINDS = ("greedy", "gumbel", "topk", "minp", "nucleus", "nucleus-draw", "epsilon")

TOP_P = (0.1, 0.5, 0.9, 0.999)


@dataclass(frozen=True, slots=True, eq=False)
class NeedBatch:
    """Needs of N rows over one vocabulary, with all their noise."""

    needs: tuple[Need, ...]
    kinds: Array  # [N] of KINDS
    adjusted: Array  # [N] bool: whether there are processors
    noise: Array  # [N, V] fp32, 0 for greedy rows
    controls: Controls  # for certified rows: top-p is done

    def take(self, rows: Array) -> NeedBatch:
        return NeedBatch(
            tuple(self.needs[row] for row in rows.tolist()),
            self.kinds[rows],
            self.adjusted[rows],
            self.noise[rows],
            Controls._make(field[rows] for field in self.controls),
        )


def random_needs(
    random: np.random.Generator,
    size: int,
    count: int,
    *,
    kinds: Sequence[str] = KINDS,
    shares: Sequence[float] = (0.29, 0.33, 0.2, 0.15, 0.005, 0.02, 0.005),
    adjusted: float = 0.08,
) -> NeedBatch:
    """``count`` needs, ``kinds`` in ``shares``, a share of them ``adjusted``."""
    chosen = random.choice(list(kinds), count, p=list(shares))
    most = max(size // 8, 2)
    needs = []
    for kind in chosen.tolist():
        name = {"greedy": "top1", "gumbel": "top1"}.get(kind, kind)
        inverse = float(
            np.float32(1.0 / random.choice([1e-4, 0.05, 0.7, 0.7, 1.0, 1.0, 2.0, 50.0]))
        )
        needs.append(
            Need(
                kind=name,
                k=int(random.integers(1, min(most, 60) + 1)) if kind == "topk" else 0,
                min_p=float(random.choice([1e-4, 0.05, 0.5, 1.0])) if kind == "minp" else 0.0,
                top_p=float(random.choice(TOP_P)) if kind in NUCLEUS_NEEDS else 1.0,
                epsilon=float(random.choice([1e-6, 1e-2, 0.3])) if kind == "epsilon" else 0.0,
                key=int(random.integers(0, 2**64, dtype=np.uint64)),
                position=int(random.integers(0, 1 << 20)),
                inverse_temperature=0.0 if kind == "greedy" else inverse,
                adjustment=random_adjustment(random, size) if random.random() < adjusted else None,
            )
        )
    return with_noise(needs, chosen, size)


def with_noise(needs: Sequence[Need], kinds: Array, size: int) -> NeedBatch:
    noise = np.zeros((len(needs), size), np.float32)
    for row, need in enumerate(needs):
        if need.inverse_temperature:
            noise[row] = gumbel_row(need.key, need.position, size)
    controls = RowTable.of(needs).controls._replace(top_p=np.ones(len(needs)))
    adjusted = np.array([need.adjustment is not None for need in needs])
    return NeedBatch(tuple(needs), kinds, adjusted, noise, controls)
