"""The loop around an engine: take commands, step, tell what happened.

What a step has decided is told before the next one computes, and where that is launched on a GPU,
while it computes. Packing and sending it takes less than handing a forward pass to another thread
would, so there is one thread, but where decisions overlap: then the body computes in a thread of
its own (its kernels release the interpreter lock) while this one waits for samplers. The order of
steps is that of `actors.engine.steps.Steps.run`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.step_plan import StepPlan
from lexshard.actors.messages import Commands, Drafts, Request, SequenceEvent, StepOutput

STATISTICS_SECONDS = 0.1  # between two, while the engine is busy
# What is asked for may take so long, and one request longer, before steps go on. To begin an
# ordinary request takes a twentieth of a millisecond.
COMMAND_SECONDS = 0.01
PREPARING_SECONDS = 0.001  # that an idle engine waits for what is prepared before it looks up


class CommandSource(Protocol):
    def receive(self, wait_seconds: float) -> Commands | None:
        """The next commands, or None when none came within ``wait_seconds`` (0: do not wait)."""


def run_engine(
    engine: Engine,
    commands: CommandSource,
    emit: Callable[[StepOutput], None],
    *,
    report_seconds: float = 1.0,
    asked: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until told to stop. While several steps are taken at once, commands count as soon as
    they are ``asked``. Speaks at least every ``report_seconds`` when idle, and more often
    when busy: a front end can tell such an engine from a dead one (but for the length of one
    step)."""
    pending: list[SequenceEvent] = []
    waiting: dict[str, deque[Request]] = {}  # what has not begun yet, by request
    early: list[Drafts] = []  # for what has not begun
    told = time.monotonic()

    def speak(*, at_rest: bool = False) -> None:
        """Tell what has happened; with it how the engine is, at times."""
        nonlocal told
        now = time.monotonic()
        statistics = None
        if at_rest or now - told >= STATISTICS_SECONDS:
            statistics, told = engine.statistics(), now
        elif not pending:
            return
        emit(StepOutput(tuple(pending), statistics))
        pending.clear()

    def obey(wait_seconds: float) -> bool:
        """Does what has been asked for meanwhile, or a part of it; False when that is to stop.
        What is cancelled before it has begun costs nothing."""
        if waiting:
            first = next(iter(waiting.values()))[0]
            engine.prepared(first, min(wait_seconds, PREPARING_SECONDS))
            wait_seconds = 0.0
        received = commands.receive(wait_seconds)
        deadline = time.monotonic() + COMMAND_SECONDS
        while received is not None:
            if received.stop:
                return False
            for request_id in received.cancel:
                waiting.pop(request_id, None)
                engine.cancel(request_id)
            for request in received.submit:
                waiting.setdefault(request.request_id, deque()).append(request)
            early.extend(received.drafts)
            received = commands.receive(0.0) if time.monotonic() < deadline else None
        for request_id, requests in list(waiting.items()):
            while requests and engine.prepared(requests[0]) and time.monotonic() < deadline:
                at_once = engine.submit(requests.popleft())
                if at_once is not None:
                    pending.append(at_once)
            if not requests:
                del waiting[request_id]
            if time.monotonic() >= deadline:
                break
        if early:
            begun = [each for each in early if each.request_id not in waiting]
            early[:] = [each for each in early if each.request_id in waiting]
            for drafts in begun:
                engine.draft(drafts)
        return True

    engine.steps.asked = asked
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="body") as body_thread:

        def beside(plan: StepPlan) -> Callable[[], torch.Tensor]:
            return body_thread.submit(engine.steps.forward, plan).result

        def here(plan: StepPlan) -> Callable[[], torch.Tensor]:
            return partial(engine.steps.forward, plan)

        def launched(plan: StepPlan) -> Callable[[], torch.Tensor]:
            hidden = engine.steps.forward(plan)
            return lambda: hidden

        start = beside if engine.overlaps else launched if engine.steps.launches else here
        if not obey(0.0):
            return
        for progress in engine.steps.run(start):
            pending.extend(progress.events)
            if progress.computing:
                speak()
                continue
            if progress.idle:
                speak(at_rest=not waiting)  # beside grammars that compile it looks all the time
                engine.steps.check_rest()
            elif start is here and not any(event.finish_reason for event in progress.events):
                # Nothing computes meanwhile: guesses for the next step can wait. With an end, which
                # may be the last one, goes how the engine is then.
                speak()
            if not obey(report_seconds if progress.idle else 0.0):
                return
