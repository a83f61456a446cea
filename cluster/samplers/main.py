"""The process of one sampler: ``python -m lexshard.cluster.samplers.main CONTROL MEMORY DOORBELL``.

The arguments are descriptors that `cluster.samplers.process` hands down. It ends when its owner's
socket does, however the owner ended.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Protocol

from lexshard.actors.decision.messages import (
    DecisionResult,
    DecisionWork,
    DenseRows,
    SamplerSettings,
)
from lexshard.actors.messages import RowDecision
from lexshard.actors.packed_arrays import encode
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.row_table import RowNames
from lexshard.cluster.samplers.dense_slots import dense_views
from lexshard.cluster.samplers.message_socket import MessageSocket
from lexshard.cluster.samplers.messages import (
    Answer,
    Assignment,
    Ready,
    Refusal,
    SamplerSetup,
    decode_assignment,
    decode_setup,
)
from lexshard.cluster.samplers.warm_up import warm_sampler
from lexshard.cluster.shared_memory.doorbell import PeerLostError
from lexshard.cluster.shared_memory.ring import RingConsumer, open_ring

NO_DELTAS = Deltas()


class Decider(Protocol):
    """What this process does with its work: `actors.decision.sampler.Sampler`."""

    def decide(self, work: DecisionWork) -> DecisionResult: ...


class SamplerServer:
    """Answers one assignment after the other; dense rows are read where the producer put them."""

    def __init__(self, sampler: Decider, ring: RingConsumer, setup: SamplerSetup) -> None:
        self._sampler = sampler
        self._ring = ring
        self._columns = setup.columns
        self._vocabulary_size = setup.settings.vocabulary_size

    def answer(self, assignment: Assignment) -> Answer | Refusal:
        """Raises `PeerLostError` where the dense rows announced will not come."""
        decisions: list[RowDecision | None] = []
        busy = 0.0
        refusal: Refusal | None = None
        for work in self._parts(assignment):
            if refusal is not None:
                continue  # the slots of the rest must be taken and released all the same
            try:
                result = self._sampler.decide(work)
            except Exception as error:
                refusal = refuse(error)
            else:
                decisions.extend(result.decisions)
                busy += result.busy_seconds
        return refusal or Answer(DecisionResult(assignment.step, tuple(decisions), busy))

    def _parts(self, assignment: Assignment) -> Iterator[DecisionWork]:
        """The candidates at once, then dense rows slot by slot while later ones are written."""
        step, deltas = assignment.step, assignment.deltas
        if assignment.candidates is not None or assignment.dense is None:
            yield DecisionWork(step, deltas, assignment.candidates)
            deltas = NO_DELTAS
        names = assignment.dense or RowNames(())
        rows = range(len(names.sequences))
        for first in rows[:: self._columns]:
            own = rows[first : first + self._columns]
            slot = self._ring.take()
            assert slot is not None  # it waits without limit
            logits, maxima = dense_views(slot, self._vocabulary_size, len(own))
            yield DecisionWork(step, deltas, dense=DenseRows(names.some(own), logits, maxima))
            self._ring.release()
            deltas = NO_DELTAS


def refuse(error: Exception) -> Refusal:
    if isinstance(error, ValueError):
        return Refusal(str(error), bad_value=True)
    return Refusal("".join(traceback.format_exception(error)), bad_value=False)


def main(make_sampler: Callable[[SamplerSettings], Decider] = warm_sampler) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to handle
    control, memory, doorbell = (int(argument) for argument in sys.argv[-3:])
    messages = MessageSocket(socket.socket(fileno=control))
    try:
        setup = decode_setup(messages.receive())
        ring = open_ring((memory, doorbell), setup.slots)
        started = time.perf_counter()
        try:
            server = SamplerServer(make_sampler(setup.settings), ring, setup)
        except Exception as error:
            messages.send(encode(refuse(error)))
            return
        messages.send(encode(Ready(time.perf_counter() - started)))
        while True:
            messages.send(encode(server.answer(decode_assignment(messages.receive()))))
    except PeerLostError:
        return


if __name__ == "__main__":
    main()
