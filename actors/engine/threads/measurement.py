"""How long steps of a few sizes take, body and head, with every number of threads there may be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lexshard.actors.body.batch import Batch, Body
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels import pool
from lexshard.kernels.attention import BLOCK_SIZE

# Rows in a step: one each of so many sequences, at most `MOST_SEQUENCES`; beyond that, chunks.
SIZES = (1, 4, 16, 64)
MOST_SEQUENCES = 16
CONTEXT = 96  # tokens before the rows of a step
# All numbers of threads take turns, so that no one has the machine's quiet moments. Short steps are
# repeated more often: one interruption must not decide.
FEWEST_TURNS, MOST_TURNS = 5, 25
SECONDS = 0.1  # per size and number of threads, after so many turns
MOST_SECONDS = 2.0  # per size, however few the turns are
# What is so much slower than the best, and has taken so many seconds, is not repeated. If it is
# fewer threads than the best, it is not tried with more rows either: they have more to share out.
HOPELESS, HOPELESS_SECONDS = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class ThreadTiming:
    """What a step of ``rows`` rows took with ``threads`` threads."""

    rows: int
    threads: int
    milliseconds: float  # median


def time_threads(body: Body, head: OutputHead, candidates: Sequence[int]) -> list[ThreadTiming]:
    """Times steps of each of `SIZES` with each number of threads that is not hopeless. Leaves the
    threads at any of ``candidates``."""
    timings: list[ThreadTiming] = []
    left = list(candidates)
    body.allocate_cache(MOST_SEQUENCES * _blocks(max(SIZES)))
    for rows in SIZES:
        seconds = _timed(body, head, rows, left)
        timings.extend(
            ThreadTiming(rows, threads, 1000.0 * statistics.median(taken))
            for threads, taken in seconds.items()
        )
        best = min(left, key=lambda threads: min(seconds[threads]))
        left = [
            each
            for each in left
            if each >= best or min(seconds[each]) <= HOPELESS * min(seconds[best])
        ]
    return timings


def _timed(
    body: Body, head: OutputHead, rows: int, candidates: Sequence[int]
) -> dict[int, list[float]]:
    """The seconds of every turn of a step with each number of threads."""
    batch = _step(body, rows)
    _run(body, head, batch, candidates[-1])  # loads and compiles what there is to
    seconds: dict[int, list[float]] = {threads: [] for threads in candidates}
    left = list(candidates)
    for turn in range(MOST_TURNS):
        for threads in left:
            seconds[threads].append(_run(body, head, batch, threads))
        best = min(min(taken) for taken in seconds.values())
        left = [
            each
            for each in left
            if min(seconds[each]) <= HOPELESS * best or sum(seconds[each]) < HOPELESS_SECONDS
        ]
        total = sum(map(sum, seconds.values()))
        if total > MOST_SECONDS or (turn + 1 >= FEWEST_TURNS and total > SECONDS * len(candidates)):
            break
    return seconds


def _run(body: Body, head: OutputHead, batch: Batch, threads: int) -> float:
    pool.set_threads(threads)
    torch.set_num_threads(threads)
    started = time.perf_counter()
    hidden = body.forward(batch)
    head.rescore(head.screen(hidden, RowTable.of([Need("top1")] * len(hidden))))
    return time.perf_counter() - started


def _blocks(rows: int) -> int:
    """How many blocks a sequence has in a step of ``rows`` rows."""
    return -(-(CONTEXT + _chunk(rows)) // BLOCK_SIZE)


def _chunk(rows: int) -> int:
    """How many of the rows belong to the same sequence."""
    return -(-rows // MOST_SEQUENCES)


def _step(body: Body, rows: int) -> Batch:
    """A step of any tokens, whose cache holds nothing in particular: it takes as long as others.
    The last row of every sequence draws."""
    chunk, blocks = _chunk(rows), _blocks(rows)
    count = rows // chunk
    first = max(0, min(CONTEXT, body.max_positions - chunk))
    sequence = np.repeat(np.arange(count, dtype=np.int32), chunk)
    positions = np.tile(np.arange(first, first + chunk, dtype=np.int32), count)
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    slots = tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    return Batch(
        token_ids=(7919 * np.arange(rows) % body.vocabulary_size).astype(np.int32),
        positions=positions,
        slots=slots + positions % BLOCK_SIZE,
        row_sequence=sequence,
        block_tables=tables,
        output_rows=np.arange(chunk - 1, rows, chunk, dtype=np.int32),
    )
