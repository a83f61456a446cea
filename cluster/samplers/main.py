"""The process of one sampler: ``python -m lexshard.cluster.samplers.main``, told a `SamplerOrder`.

It ends when its owner's socket does, however the owner ended.
"""

from __future__ import annotations

import signal
import socket
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
from lexshard.actors.states.deltas import NO_DELTAS
from lexshard.actors.states.row_table import RowNames
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.roles.process import read_order
from lexshard.cluster.samplers.dense_slots import dense_views
from lexshard.cluster.samplers.messages import (
    Answer,
    Assignment,
    Ready,
    Refusal,
    SamplerOrder,
    decode_assignment,
)
from lexshard.cluster.samplers.warm_up import warm_sampler
from lexshard.cluster.shared_memory.ring import RingConsumer, open_ring


class Decider(Protocol):
    """What this process does with its work: `actors.decision.sampler.Sampler`."""

    def decide(self, work: DecisionWork) -> DecisionResult: ...


class SamplerServer:
    """Answers one assignment after the other; dense rows are read where the producer put them."""

    def __init__(self, sampler: Decider, ring: RingConsumer, order: SamplerOrder) -> None:
        self._sampler = sampler
        self._ring = ring
        self._rows = order.rows
        self._vocabulary_size = order.settings.vocabulary_size

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
        for first in rows[:: self._rows]:
            own = rows[first : first + self._rows]
            logits, maxima = dense_views(self._ring.take(), self._vocabulary_size, len(own))
            yield DecisionWork(step, deltas, dense=DenseRows(names.some(own), logits, maxima))
            self._ring.release()
            deltas = NO_DELTAS


def refuse(error: Exception) -> Refusal:
    if isinstance(error, ValueError):
        return Refusal(str(error), bad_value=True)
    return Refusal("".join(traceback.format_exception(error)), bad_value=False)


def main(make_sampler: Callable[[SamplerSettings], Decider] = warm_sampler) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to handle
    order = read_order(SamplerOrder)
    link = Link(socket.socket(fileno=order.link))
    try:
        ring = open_ring(order.ring, order.slots)
        try:
            server = SamplerServer(make_sampler(order.settings), ring, order)
        except Exception as error:
            link.send(encode(refuse(error)))
            return
        link.send(encode(Ready()))
        while True:
            link.send(encode(server.answer(decode_assignment(link.receive()))))
    except PeerLostError:
        return


if __name__ == "__main__":
    main()
