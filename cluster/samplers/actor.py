"""A sampler as a Ray actor, on this machine or another one.

Candidate rows are small messages. Dense rows go by value: Ray puts what is large into its object
store, from where the actor copies them into memory of its own. On the engine's own machine a
`SamplerProcess` is the faster choice.

An actor on this machine that has been stopped (SIGSTOP) is killed when it is waited for, like a
`SamplerProcess`. Elsewhere a stop is not seen: a wait for it lasts until it goes on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import ray

from lexshard.actors.decision.messages import (
    CandidateRows,
    DecisionResult,
    DecisionWork,
    DenseRows,
    SamplerSettings,
)
from lexshard.actors.decision.plane import SamplerLostError
from lexshard.actors.role import Place
from lexshard.cluster.link import PeerLostError
from lexshard.cluster.roles.actor import answer_of, own_node, place_in_cluster, start_actor
from lexshard.cluster.roles.stopped import LOOK_SECONDS, StoppedProcess
from lexshard.cluster.samplers.dense_slots import slot_bytes, write_dense

# Of a node that cannot be reached Ray knows nothing for a minute, and a step would wait so long.
REMOTE_SECONDS = 10.0


class SamplerActor:
    """The actor. Arrays arrive read-only, for which the sampler's kernels are not compiled: they
    are copied, dense rows into memory that grows with the largest step."""

    def __init__(self, settings: SamplerSettings) -> None:
        from lexshard.cluster.samplers.warm_up import warm_sampler

        self._sampler = warm_sampler(settings)
        self._memory = np.empty(0, np.uint8)

    def place(self) -> Place:
        """Where it is; answers once the sampler is warm."""
        return place_in_cluster()

    def decide(self, work: DecisionWork) -> DecisionResult:
        candidates = None if work.candidates is None else _writable(work.candidates)
        dense = None if work.dense is None else self._own(work.dense)
        return self._sampler.decide(replace(work, candidates=candidates, dense=dense))

    def _own(self, dense: DenseRows) -> DenseRows:
        rows, size = dense.logits.shape
        needed = slot_bytes(size, rows)
        if self._memory.size < needed:
            self._memory = np.empty(needed, np.uint8)
        logits, maxima = write_dense(self._memory, dense.logits)
        return replace(dense, logits=logits, maxima=maxima)


class RemoteSampler:
    """A `SamplerActor` of its own; Ray must be running. Returns when it is warm.

    ``options`` are Ray's for the actor: where it runs and what it reserves; ``closed`` is called
    once when it is closed. Raises `SamplerLostError`, with the reason, where the actor dies before
    that, cannot be made, or is not warm when ``closing`` is set: a thread that waits while its
    process leaves Ray may crash it.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        closing: Event,
        closed: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self._closed = closed
        self._actor = start_actor(SamplerActor, settings, **options)
        self.place = self._begun(closing)
        self.process_id = self.place.process_id
        self._local = self.place.node == own_node()

    def submit(self, work: DecisionWork) -> ActorDecision:
        """Hands ``work`` over; its arrays may change once this returns."""
        return ActorDecision(self, self._actor.decide.remote(work))

    def close(self) -> None:
        """Ends the actor. What is pending is lost. Closing twice is harmless."""
        if self._local and StoppedProcess(self.process_id).now():
            self._kill()
        ray.kill(self._actor)
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()

    def wait(self, reference: Any) -> Any:
        """What ``reference`` stands for. Raises `SamplerLostError` where the actor died, or cannot
        be reached."""
        process = StoppedProcess(self.process_id)
        while True:
            with suppress(TimeoutError):
                return _answer(reference, LOOK_SECONDS if self._local else REMOTE_SECONDS)
            if not self._local:
                raise SamplerLostError(
                    f"the sampler on {self.place.host} has not answered for {REMOTE_SECONDS:g} s"
                )
            if process.look():
                self._kill()

    def _begun(self, closing: Event) -> Place:
        reference = self._actor.place.remote()
        while not closing.is_set():
            with suppress(TimeoutError):
                place: Place = _answer(reference, LOOK_SECONDS)
                return place
        ray.kill(self._actor)
        raise SamplerLostError("the sampler actor was not ready when its plane ended")

    def _kill(self) -> None:
        """For one that has been stopped, which does not do what Ray asks of it."""
        with suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)


class ActorDecision:
    """A decision on its way from a `RemoteSampler`."""

    __slots__ = ("_actor", "_reference")

    def __init__(self, actor: RemoteSampler, reference: Any) -> None:
        self._actor = actor
        self._reference = reference

    def result(self) -> DecisionResult:
        """Waits for it. Raises `SamplerLostError` where the actor died, and what it raised."""
        result: DecisionResult = self._actor.wait(self._reference)
        return result


def _answer(reference: Any, seconds: float) -> Any:
    try:
        return answer_of(reference, seconds)
    except PeerLostError as error:
        raise SamplerLostError(str(error)) from error


def _writable(rows: CandidateRows) -> CandidateRows:
    names = ("ids", "raw", "offsets", "truncated")
    return replace(rows, **{name: getattr(rows, name).copy() for name in names})
