"""What happened to sequences, for everyone who keeps their sampling state."""

from __future__ import annotations

from dataclasses import dataclass

from lexshard.actors.messages import Request


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence a sampler is to decide from now on.

    ``output_ids`` is its whole output so far, ``request.resumed_ids`` included.
    """

    sequence: int
    request: Request
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Deltas:
    """What happened to a sampler's sequences since the last message, in this order.

    ``appended`` holds (sequence, its new token ids) in order of time.
    """

    closed: tuple[int, ...] = ()
    opened: tuple[OpenSequence, ...] = ()
    appended: tuple[tuple[int, tuple[int, ...]], ...] = ()


NO_DELTAS = Deltas()
