"""Work for samplers wherever they run, and their answers side by side."""

from __future__ import annotations

import numpy as np

from lexshard.actors.decision.local_samplers import InlineSampler
from lexshard.actors.decision.messages import (
    CandidateRows,
    DecisionResult,
    DecisionWork,
    DenseRows,
    SamplerSettings,
)
from lexshard.actors.decision.plane import SamplerHandle
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.deltas import Deltas, OpenSequence
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels.decision import block_maxima

SIZE = 1_000


SETTINGS = SamplerSettings(SIZE, (0, 3), capacity=4)


PARAMETERS = (
    SamplingParameters(
        temperature=0.9,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((7, 2.0),),
        bad_words=((9,), (4, 5)),
        seed=1,
    ),
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.3, top_p=0.8, seed=3, allowed_ids=tuple(range(0, 800, 3))),
    SamplingParameters(temperature=1.0, seed=2**63, min_tokens=3),
)


def opened(first: int, count: int, prompt: int = 20) -> tuple[OpenSequence, ...]:
    random = np.random.default_rng(first)
    return tuple(
        OpenSequence(
            first + i,
            Request(
                str(first + i),
                0,
                tuple(random.integers(0, SIZE, prompt).tolist()),
                PARAMETERS[i % len(PARAMETERS)],
            ),
        )
        for i in range(count)
    )


def dense_rows(random: np.random.Generator, sequences: tuple[int, ...]) -> DenseRows:
    """With the producer's maxima or without."""
    logits = (3 * random.standard_normal((len(sequences), SIZE))).astype(np.float32)
    return DenseRows(
        RowNames(sequences), logits, block_maxima(logits) if random.random() < 0.5 else None
    )


def candidate_rows(random: np.random.Generator, sequences: tuple[int, ...]) -> CandidateRows:
    ids = [np.flatnonzero(random.random(SIZE) < 0.1).astype(np.int32) for _ in sequences]
    ids = [each if len(each) else np.array([5], np.int32) for each in ids]
    raw = (3 * random.standard_normal(sum(map(len, ids)))).astype(np.float32)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    truncated = random.random(len(sequences)) < 0.2
    return CandidateRows(RowNames(sequences), np.concatenate(ids), raw, offsets, truncated)


def comparable(result: DecisionResult) -> tuple[int, object]:
    return result.step, result.decisions


def decides_as_one_here(sampler: SamplerHandle, count: int) -> None:
    """Candidates and dense rows in one step, over steps, as a sampler in this process does."""
    random = np.random.default_rng(count)
    inline = InlineSampler(Sampler(SETTINGS))
    first = 100 * count
    sequences = tuple(range(first, first + count))
    deltas = Deltas(opened=opened(first, count))
    for step in range(6):
        cut = int(random.integers(0, count + 1)) if step else count
        work = DecisionWork(
            step,
            deltas,
            candidate_rows(random, sequences[:cut]) if cut else None,
            dense_rows(random, sequences[cut:]) if cut < count else None,
        )
        result = sampler.submit(work).result()
        assert comparable(result) == comparable(inline.submit(work).result())
        tokens = [0 if each is None else each.token_id for each in result.decisions]
        deltas = Deltas(appended=tuple(zip(sequences, ((t,) for t in tokens), strict=True)))
    assert sampler.submit(DecisionWork(6, Deltas(closed=sequences))).result().decisions == ()
