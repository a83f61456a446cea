"""A sampler in a process of its own: messages through a socket, dense rows through shared memory.

Submitting returns as soon as the rows are in the ring, so that the sampler decides one step while
the next is computed. Neither process outlives the other: the child ends with its owner's socket,
and the owner learns of the child's death from the same socket. A child that has been stopped is
killed when it is waited for (`cluster.roles.stopped`). The memory has no name, so nothing is
left of it.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.messages import (
    DecisionResult,
    DecisionWork,
    DenseRows,
    SamplerSettings,
)
from lexshard.actors.decision.plane import SamplerLostError
from lexshard.actors.packed_arrays import encode
from lexshard.actors.role import Place, here
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.roles.process import ProcessRole, command_of, start_process
from lexshard.cluster.roles.stopped import StoppedProcess
from lexshard.cluster.samplers.dense_slots import slot_bytes, write_dense
from lexshard.cluster.samplers.messages import (
    Answer,
    Assignment,
    Ready,
    Refusal,
    SamplerOrder,
    decode_reply,
)
from lexshard.cluster.shared_memory.ring import RingProducer, create_ring

COMMAND = command_of("lexshard.cluster.samplers.main")

# Four slots of eight rows keep a producer and a consumer busy.
ROWS = 8
SLOTS = 4
EXIT_SECONDS = 5.0


class SamplerProcess:
    """One child process with a `Sampler`; use it from one thread at a time.

    ``rows`` dense rows fit a slot, of which there are ``slots``: rows * slots * V * 4 bytes
    of memory, which is committed when dense rows first use it. Returns when the child is warm.
    Raises ValueError or RuntimeError where the sampler cannot be made, with its reason, and
    `SamplerLostError` where the child dies or is stopped before that.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        rows: int = ROWS,
        slots: int = SLOTS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._vocabulary_size = settings.vocabulary_size
        self._rows = rows
        self._lost: str | None = None
        self._waiting: deque[ProcessDecision] = deque()
        self._ring, own, self._process = _start(settings, rows, slots, command)
        self._stopped = StoppedProcess(self._process.pid)
        self._messages = Link(own, self._stopped)
        self._progress = select.poll()
        self._progress.register(self._messages, select.POLLIN)
        self._progress.register(self._ring, select.POLLIN)
        self._await_ready()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def place(self) -> Place:
        return Place(here().host, self.process_id)

    def submit(self, work: DecisionWork) -> ProcessDecision:
        """Hands ``work`` over; its arrays may change once this returns.

        Waits only while the ring is full. Raises `SamplerLostError` where the child is gone, and
        ValueError for dense rows of another vocabulary.
        """
        if self._lost is not None:
            raise SamplerLostError(self._lost)
        dense = None if work.dense is None else self._checked(work.dense).rows
        message = encode(Assignment(work.step, work.deltas, work.candidates, dense))
        pending = ProcessDecision(self)
        self._waiting.append(pending)
        try:
            self._messages.send(message)
            if work.dense is not None:
                self._write(work.dense)
        except PeerLostError:
            raise self._lose() from None
        except BaseException:  # half of a step has been handed over: there is no way on from here
            self._lose()
            raise
        return pending

    def close(self) -> None:
        """Ends the child. What is pending is lost. Closing twice is harmless."""
        if self._lost is not None:
            return
        if self._stopped.now():
            self._process.kill()
        self._let_go("the sampler process has been closed")
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def settle(self, pending: ProcessDecision) -> None:
        """Waits until ``pending`` has its outcome, which may be that the child died."""
        while pending.outcome is None:
            try:
                self._take(self._messages.receive())
            except PeerLostError:
                self._lose()

    def _await_ready(self) -> None:
        try:
            reply = decode_reply(self._messages.receive())
        except PeerLostError:
            raise self._lose() from None
        if not isinstance(reply, Ready):
            self.close()
            raise _raised(reply)

    def _checked(self, dense: DenseRows) -> DenseRows:
        expected = (len(dense.rows.sequences), self._vocabulary_size)
        if dense.logits.shape != expected:
            raise ValueError(f"dense logits {expected} expected, got {dense.logits.shape}")
        return dense

    def _write(self, dense: DenseRows) -> None:
        for first in range(0, len(dense.logits), self._rows):
            write_dense(self._reserve(), dense.logits[first : first + self._rows])
            self._ring.publish()

    def _reserve(self) -> npt.NDArray[np.uint8]:
        """A free slot. Answers are taken in meanwhile: a child that cannot send frees no slot."""
        while (slot := self._ring.reserve()) is None:
            self._messages.wait(self._progress)
            for message in self._messages.arrived():
                self._take(message)
        return slot

    def _take(self, message: bytes) -> None:
        self._stopped.answered()
        reply = decode_reply(message)
        pending = self._waiting.popleft()
        pending.outcome = reply.result if isinstance(reply, Answer) else _raised(reply)

    def _lose(self) -> SamplerLostError:
        if self._lost is None:
            self._process.kill()  # it has gone, or is stopped or without its socket and of no use
            end = f"has ended with code {self._process.wait()}"
            if self._stopped.for_good:
                end = "had been stopped and was killed"
            self._let_go(f"the sampler process {self.process_id} {end}")
        return SamplerLostError(self._lost)

    def _let_go(self, reason: str) -> None:
        self._lost = reason
        self._messages.close()
        self._ring.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for pending in self._waiting:
            pending.outcome = SamplerLostError(reason)
        self._waiting.clear()


class ProcessDecision:
    """A decision on its way from a `SamplerProcess`."""

    __slots__ = ("_process", "outcome")

    def __init__(self, process: SamplerProcess) -> None:
        self._process = process
        self.outcome: DecisionResult | Exception | None = None

    def result(self) -> DecisionResult:
        """Waits for it. Raises `SamplerLostError` where the child died or was stopped, ValueError
        or RuntimeError where the sampler raised."""
        if self.outcome is None:
            self._process.settle(self)
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def _start(
    settings: SamplerSettings, rows: int, slots: int, command: Sequence[str]
) -> tuple[RingProducer, socket.socket, subprocess.Popen[bytes]]:
    """The ring, this side's end of the messages' socket, and the child."""
    ring, inherited = create_ring(slots, slot_bytes(settings.vocabulary_size, rows))
    own, other = socket.socketpair()
    order = SamplerOrder(settings, rows, slots, other.fileno(), inherited)
    files = (other.fileno(), *inherited)
    role = ProcessRole("sampler", tuple(command), msgspec.json.encode(order), files)
    try:
        threads = {"OMP_NUM_THREADS": str(settings.threads)}
        process = start_process(role, environment=threads)
    except BaseException:
        ring.close()
        own.close()
        raise
    finally:  # the child's ends must be open in the child alone, or its death cannot be seen
        other.close()
        os.close(inherited[1])
    return ring, own, process


def _raised(reply: Ready | Answer | Refusal) -> Exception:
    if isinstance(reply, Refusal):
        return ValueError(reply.message) if reply.bad_value else RuntimeError(reply.message)
    return RuntimeError(f"the sampler process sent {type(reply).__name__} out of turn")
