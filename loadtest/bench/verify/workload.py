"""What the verification benchmark decides on: rows of a target and of a drafter, and the drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.verify import DenseProposals, DraftedRows
from lexshard.loadtest.bench.sampler.workload import synthetic_rows
from lexshard.loadtest.bench.verify.options import AGREEMENTS

SEQUENCES = 16  # of a run, however many are verified at a time: steps of one, or one of sixteen

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class VerifyStep:
    """A batch that is verified at once: N sequences with the same number of drafts, temperature 1.
    Each draft was drawn from its proposal with the noise that plain decoding would have."""

    logits: Rows  # [N (gamma + 1), V]
    proposed: Rows  # [N gamma, V]
    rows: DraftedRows

    @property
    def batch(self) -> int:
        return len(self.rows.key)

    @property
    def gamma(self) -> int:
        return len(self.proposed) // self.batch

    @property
    def proposals(self) -> DenseProposals:
        return DenseProposals(self.proposed, np.ones(self.batch))

    @property
    def input_bytes(self) -> int:
        return self.logits.nbytes + self.proposed.nbytes

    def first(self, count: int) -> VerifyStep:
        """Its first sequences alone."""
        gamma, rows = self.gamma, self.rows
        own = DraftedRows(
            rows.offsets[: count + 1],
            rows.drafts[: count * gamma],
            rows.inverse_temperature[:count],
            rows.key[:count],
            rows.position[:count],
        )
        return VerifyStep(self.logits[: count * (gamma + 1)], self.proposed[: count * gamma], own)


def steps_of(
    vocabulary: int, gamma: int, batch: int, agreement: str, seed: int
) -> list[VerifyStep]:
    """The steps of a run over `SEQUENCES` sequences (more only where one batch has more)."""
    count = -(-SEQUENCES // batch)
    sequences = count * batch
    logits = synthetic_rows(vocabulary, sequences * (gamma + 1), seed)
    chance = np.random.Generator(np.random.Philox(key=seed + 1))
    tested = np.delete(np.arange(len(logits)), np.s_[gamma :: gamma + 1])
    proposed = logits[tested]
    if AGREEMENTS[agreement]:
        noise = chance.standard_normal(proposed.shape, dtype=np.float32)
        proposed += noise * np.float32(AGREEMENTS[agreement])
    drafts = np.array(
        [
            np.argmax(row + gumbel_row(index // gamma, index % gamma, vocabulary))
            for index, row in enumerate(proposed)
        ]
    )
    return [
        VerifyStep(
            logits[first * (gamma + 1) : (first + batch) * (gamma + 1)],
            proposed[first * gamma : (first + batch) * gamma],
            DraftedRows(
                np.arange(batch + 1) * (gamma + 1),
                drafts[first * gamma : (first + batch) * gamma],
                np.ones(batch),
                np.arange(first, first + batch, dtype=np.uint64),
                np.zeros(batch, np.uint64),
            ),
        )
        for first in range(0, sequences, batch)
    ]
