"""A sampler of this process, in the caller's thread."""

from __future__ import annotations

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
