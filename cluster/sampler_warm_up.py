"""A sampler that leaves nothing to load or compile for the first decision it is asked for."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from actors.build_plane import load_hot_vocabulary
from actors.decision_messages import (
    CandidateRows,
    DecisionWork,
    Deltas,
    DenseRows,
    OpenSequence,
    SamplerSettings,
)
from actors.messages import Request, SamplingParameters
from actors.sampler import Sampler
from cluster.dense_slots import dense_views, slot_bytes
from kernels import pool
from kernels.columns import write_columns

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


def warm_sampler(settings: SamplerSettings) -> Sampler:
    """A new sampler in a process that is its own: threads are set for the whole process.

    Raises what `Sampler` raises, and ValueError where the hot vocabulary does not fit.
    """
    pool.set_threads(settings.threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(settings.threads)
    # Of its own, so that nothing of it counts for the hot vocabulary's statistics.
    sampler = Sampler(replace(settings, hot_vocabulary=None))
    for columns in sorted({1, len(KINDS) * settings.threads}):
        sampler.decide(_work(settings.vocabulary_size, columns))
    return Sampler(settings, hot=load_hot_vocabulary(settings))


def _work(vocabulary_size: int, columns: int) -> DecisionWork:
    """Every kind of decision, its arrays of the types and layouts that will be served."""
    sequences = tuple(range(columns, 2 * columns))  # not those of the other work
    rows = np.zeros((columns, vocabulary_size), np.float32)
    slot = np.zeros(slot_bytes(vocabulary_size, columns), np.uint8)
    logits, maxima = dense_views(slot, vocabulary_size, columns)
    write_columns(rows, logits, maxima)
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
            sequences,
            np.tile(np.arange(candidates, dtype=np.int32), columns),
            np.zeros(columns * candidates, np.float32),
            np.arange(columns + 1, dtype=np.int64) * candidates,
            np.zeros(columns, np.bool_),
        ),
        dense=DenseRows(sequences, logits, maxima),
    )
