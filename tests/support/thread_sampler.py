"""A sampler that decides beside the thread that asks, without a process of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from lexshard.actors.decision.messages import DecisionResult, DecisionWork
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.role import Place, here


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
