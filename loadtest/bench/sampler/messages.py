"""What a workload of the sampler benchmark says to our samplers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lexshard.actors.decision.messages import CandidateRows
from lexshard.actors.messages import Request
from lexshard.actors.states.deltas import Deltas, OpenSequence
from lexshard.actors.states.row_table import RowNames
from lexshard.loadtest.bench.sampler.workload import SamplerWorkload


def requests(workload: SamplerWorkload) -> list[Request]:
    """The sequences of a workload; their outputs before step 0 are not in the requests."""
    return [
        Request(str(row), 0, tuple(prompt), workload.setting.parameters(seed=row))
        for row, prompt in enumerate(workload.prompts.tolist())
    ]


def opening(workload: SamplerWorkload, rows: Sequence[int]) -> Deltas:
    """Opens the sequences of ``rows``."""
    made = requests(workload)
    return Deltas(
        opened=tuple(
            OpenSequence(row, made[row], tuple(workload.outputs[row].tolist())) for row in rows
        )
    )


def appending(workload: SamplerWorkload, step: int, rows: Sequence[int]) -> Deltas:
    """What happens to the sequences of ``rows`` after a step."""
    tokens = workload.appended[step].tolist()
    return Deltas(appended=tuple((row, (tokens[row],)) for row in rows))


def candidate_rows(workload: SamplerWorkload, step: int, rows: Sequence[int]) -> CandidateRows:
    """The candidates of some rows of a step, with their raw logits."""
    found = workload.candidates(step)
    raw = workload.logits(step)
    ids = [found[row] for row in rows]
    nucleus = workload.setting.certificate == "nucleus"
    return CandidateRows(
        RowNames(tuple(rows)),
        np.concatenate(ids),
        np.concatenate([raw[row, each] for row, each in zip(rows, ids, strict=True)]),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
        np.full(len(ids), nucleus),
    )
