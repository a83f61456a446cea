"""What the verification benchmark decides on: rows of a target and of a drafter, and the drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lexshard.actors.states.need import Need
from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.verify import DenseProposals, DraftedRows
from lexshard.loadtest.bench.options.verify import AGREEMENTS
from lexshard.loadtest.bench.synthetic.head_workload import SAMPLING_METHODS
from lexshard.loadtest.bench.synthetic.logits import synthetic_rows

SEQUENCES = 16  # of a run, however many are verified at a time: steps of one, or one of sixteen

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class VerifyStep:
    """A batch that is verified at once: N sequences with the same number of drafts, temperature 1.
    Each draft was drawn from its proposal with the noise that plain decoding would have."""

    logits: Rows  # [N (gamma + 1), V]
    proposed: Rows  # [N gamma, V]
    rows: DraftedRows  # N gamma
    batch: int

    @property
    def gamma(self) -> int:
        return len(self.proposed) // self.batch

    @property
    def proposals(self) -> DenseProposals:
        return DenseProposals(self.proposed, np.ones(len(self.proposed)))

    @property
    def target(self) -> tuple[Rows, Rows]:
        """The target's rows that test a draft [N gamma, V], and those behind all drafts [N, V]."""
        size = self.logits.shape[1]
        rows = self.logits.reshape(self.batch, -1, size)
        tested = rows[:, :-1].reshape(-1, size)
        return np.ascontiguousarray(tested), np.ascontiguousarray(rows[:, -1])

    @property
    def last_needs(self) -> list[Need]:
        """What the rows behind all drafts ask [N]: a draw with the noise of their sequence."""
        gumbel = SAMPLING_METHODS["gumbel"]
        keys = self.rows.key[:: self.gamma].tolist()
        return [replace(gumbel, key=key, position=self.gamma) for key in keys]

    @property
    def input_bytes(self) -> int:
        return self.logits.nbytes + self.proposed.nbytes

    def some(self, first: int, count: int) -> VerifyStep:
        """``count`` of its sequences alone, from the ``first`` on."""
        target, drafter = (
            slice(first * rows, (first + count) * rows) for rows in (self.gamma + 1, self.gamma)
        )
        drafts, scales, keys, positions = (each[drafter] for each in self.rows)
        own = DraftedRows(drafts, scales, keys, positions)  # type: ignore[arg-type]
        return VerifyStep(self.logits[target], self.proposed[drafter], own, count)


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
    rows = DraftedRows(
        drafts,
        np.ones(len(drafts)),
        np.arange(sequences, dtype=np.uint64).repeat(gamma),
        np.tile(np.arange(gamma, dtype=np.uint64), sequences),
    )
    whole = VerifyStep(logits, proposed, rows, sequences)
    return [whole.some(first, batch) for first in range(0, sequences, batch)]
