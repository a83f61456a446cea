"""What happened to sequences, for everyone who keeps their sampling state."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Outbox:
    """Deltas that somebody has not been told yet."""

    closed: list[int] = field(default_factory=list)
    opened: dict[int, OpenSequence] = field(default_factory=dict)
    appended: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def take(self) -> Deltas:
        """All of them; they are told now."""
        if not (self.closed or self.opened or self.appended):
            return NO_DELTAS
        deltas = Deltas(tuple(self.closed), tuple(self.opened.values()), tuple(self.appended))
        self.closed, self.opened, self.appended = [], {}, []
        return deltas

    def open(self, opened: OpenSequence) -> None:
        """A sequence is theirs from now on; one that waits to be opened is replaced."""
        self.opened[opened.sequence] = opened

    def append(self, sequence: int, token_ids: tuple[int, ...]) -> None:
        """New tokens of a sequence that is not waiting to be opened."""
        self.appended.append((sequence, token_ids))

    def close(self, sequence: int) -> None:
        """A sequence is theirs no more."""
        if self.opened.pop(sequence, None) is None:
            self.closed.append(sequence)
        self.appended = [each for each in self.appended if each[0] != sequence]
