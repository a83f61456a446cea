"""Work that drives every kernel of a sampler once, so that no decision waits for a compiler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.messages import CandidateRows, DecisionWork, DenseRows
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.deltas import Deltas, OpenSequence
from lexshard.actors.states.row_table import RowNames

EVERY_CONTROL = SamplingParameters(
    temperature=0.8,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((1, 0.5),),
    bad_words=((2,),),
)
KINDS = (EVERY_CONTROL, SamplingParameters(temperature=0.0, logprobs=1))


def warm_up_work(
    logits: npt.NDArray[np.float32], maxima: npt.NDArray[np.float32] | None = None
) -> DecisionWork:
    """Every kind of decision for dense ``logits`` [B, V], and for as many candidate rows, of
    sequences that are opened."""
    rows, vocabulary_size = logits.shape
    sequences = tuple(range(rows, 2 * rows))  # not those of other numbers of rows
    names = RowNames(sequences)
    candidates = min(vocabulary_size, 90)
    return DecisionWork(
        step=0,
        deltas=Deltas(
            opened=tuple(
                OpenSequence(each, Request("", 0, (0,), KINDS[each % len(KINDS)]))
                for each in sequences
            )
        ),
        candidates=CandidateRows(
            names,
            np.tile(np.arange(candidates, dtype=np.int32), rows),
            np.zeros(rows * candidates, np.float32),
            np.arange(rows + 1, dtype=np.int64) * candidates,
            np.zeros(rows, np.bool_),
        ),
        dense=DenseRows(names, logits, maxima),
    )
