"""Sampler processes of tests, and a decision plane that is played for a while."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.plane import DecisionPlane
from lexshard.actors.messages import Certificate
from lexshard.actors.states.row_table import RowNames
from lexshard.cluster.samplers.process import SamplerProcess
from tests.support.paths import SUPPORT
from tests.support.sampler_work import SETTINGS, SIZE, opened


def stand_in(how: str) -> tuple[str, ...]:
    """The command of the stand-in that behaves like ``how``."""
    return (sys.executable, str(SUPPORT / "sampler_stand_in.py"), how)


@contextmanager
def running(how: str | None = None, **options: int) -> Iterator[SamplerProcess]:
    """A real sampler, or the stand-in that behaves like ``how``."""
    command = {} if how is None else {"command": stand_in(how)}
    process = SamplerProcess(SETTINGS, **options, **command)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        process.close()


def play(
    plane: DecisionPlane, kill_before: int | None = None, signal_number: int = signal.SIGKILL
) -> list[list[int]]:
    """25 steps of six sequences, candidates and dense rows mixed; one sampler gets a signal in
    mid-step."""
    random = np.random.default_rng(6)
    histories = [list(each.request.prompt_ids) for each in opened(0, 6)]
    for each, history in zip(opened(0, 6), histories, strict=True):
        plane.open(each.sequence, each.request, history)
    for step in range(25):
        dense = random.random(6) < 0.5
        ids = [
            np.arange(SIZE) if whole else np.flatnonzero(random.random(SIZE) < 0.2)
            for whole in dense
        ]
        raw = (3 * random.standard_normal(sum(map(len, ids)))).astype(np.float32)
        candidates = Candidates(
            np.concatenate(ids).astype(np.int32),
            raw,
            np.cumsum([0, *map(len, ids)], dtype=np.int64),
            tuple(
                Certificate("dense" if whole else "topk", "dense", "", len(each), 0)
                for whole, each in zip(dense, ids, strict=True)
            ),
        )
        submitted = plane.submit(step, RowNames(tuple(range(6))), candidates)
        if step == kill_before:
            victim = next(iter(plane._handles.values()))
            assert isinstance(victim, SamplerProcess)
            os.kill(victim.process_id, signal_number)
        for sequence, decision in enumerate(submitted.result()):
            token = 0 if decision is None else decision.token_id
            histories[sequence].append(token)
            plane.append(sequence, token)
    plane.shut_down()
    return histories
