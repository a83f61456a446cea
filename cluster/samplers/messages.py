"""What a sampler process and its owner send each other, as msgpack of the dataclasses themselves.

Nothing that arrives is ever executed. Arrays travel as their bytes; logits of dense rows do not
travel here at all but through a ring of shared memory.
"""

from __future__ import annotations

import msgspec

from lexshard.actors.decision.messages import CandidateRows, DecisionResult, SamplerSettings
from lexshard.actors.packed_arrays import read_array
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.row_table import RowNames


class SamplerOrder(msgspec.Struct, frozen=True):
    """What a sampler's process is told: ``rows`` dense rows fit one of the ``slots`` of the
    ring. ``link`` and ``ring`` (memory, doorbell) are descriptors that it is handed."""

    settings: SamplerSettings
    rows: int
    slots: int
    link: int
    ring: tuple[int, int]


class Assignment(msgspec.Struct, frozen=True):
    """A `DecisionWork` whose dense rows, those of the names ``dense``, come through the ring.

    They fill one slot after the other, ``SamplerOrder.rows`` in each.
    """

    step: int
    deltas: Deltas
    candidates: CandidateRows | None
    dense: RowNames | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first message: the kernels are loaded or compiled."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The decisions of one `Assignment`. They come in the order of the assignments."""

    result: DecisionResult


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """What was raised instead. ``bad_value``: a ValueError, which says what was asked wrongly."""

    message: str
    bad_value: bool


Reply = Ready | Answer | Refusal

decode_assignment = msgspec.msgpack.Decoder(Assignment, dec_hook=read_array).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
