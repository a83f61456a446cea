"""Samplers of this process: in the caller's thread, or in a thread of their own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from lexshard.actors.decision.messages import DecisionResult, DecisionWork
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.role import Place, here
from lexshard.actors.states.deltas import NO_DELTAS


class _Postponed:
    def __init__(self, sampler: Sampler, work: DecisionWork) -> None:
        self._sampler = sampler
        self._work = work

    def result(self) -> DecisionResult:
        return self._sampler.decide(self._work)


class InlineSampler:
    """Decides when it is asked for the result, in the thread that asks."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def submit(self, work: DecisionWork) -> _Postponed:
        if work.deltas is not NO_DELTAS:
            # At once: results may be asked for in another order.
            self._sampler.apply(work.deltas)
            work = replace(work, deltas=NO_DELTAS)
        return _Postponed(self._sampler, work)

    def close(self) -> None:
        """Nothing to end."""

    @property
    def place(self) -> Place:
        return here()


class ThreadSampler:
    """Decides in a thread of its own: the kernels release the interpreter lock."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")

    def submit(self, work: DecisionWork) -> Future[DecisionResult]:
        return self._thread.submit(self._sampler.decide, work)

    def close(self) -> None:
        self._thread.shutdown()

    @property
    def place(self) -> Place:
        return here()
