"""The loop around an engine: take commands, step, tell what happened, and do both at once.

While the body computes step N in its own thread (its kernels release the interpreter lock), this
thread hands on what step N - 1 decided. Nothing waits for a message to be packed or sent. The order
of steps is that of `actors.engine.steps.Steps.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from actors.engine.engine import Engine
from actors.engine.scheduler import StepPlan
from actors.messages import Commands, SequenceEvent, StepOutput


class CommandSource(Protocol):
    def receive(self, wait_seconds: float) -> Commands | None:
        """The next commands, or None when none came within ``wait_seconds`` (0: do not wait)."""


def run_engine(
    engine: Engine,
    commands: CommandSource,
    emit: Callable[[StepOutput], None],
    *,
    report_seconds: float = 1.0,
) -> None:
    """Serve until told to stop. Speaks at least every ``report_seconds``, events or not: a front
    end can tell a busy or idle engine from a dead one (but for the length of one step)."""
    pending: list[SequenceEvent] = []
    spoken = time.monotonic()

    def speak() -> None:
        nonlocal pending, spoken
        emit(StepOutput(tuple(pending), engine.statistics()))
        pending, spoken = [], time.monotonic()

    def obey(wait_seconds: float) -> bool:
        """Does what has been asked for meanwhile; False when that is to stop."""
        received = commands.receive(wait_seconds)
        while received is not None:
            if received.stop:
                return False
            _apply(engine, received, pending)
            received = commands.receive(0.0)
        return True

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="body") as body_thread:

        def start(plan: StepPlan) -> Callable[[], torch.Tensor]:
            return body_thread.submit(engine.steps.forward, plan).result

        if not obey(0.0):
            return
        for progress in engine.steps.run(start):
            pending.extend(progress.events)
            if progress.computing:
                if pending or time.monotonic() - spoken >= report_seconds:
                    speak()
                continue
            if progress.idle:
                speak()
                engine.check_idle()
            if not obey(report_seconds if progress.idle else 0.0):
                return


def _apply(engine: Engine, commands: Commands, pending: list[SequenceEvent]) -> None:
    if commands.forget:
        pending.clear()
        engine.cancel_everything()
    for request_id in commands.cancel:
        engine.cancel(request_id)
    for request in commands.submit:
        refusal = engine.submit(request)
        if refusal is not None:
            pending.append(refusal)
