"""A process elsewhere that keeps sampling states: which sequences, and what it is not yet told.

Samplers and shards follow the engine in the same way. Nothing they know is theirs alone: where one
is lost, `Follower.anew` is all that another must be told to stand in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lexshard.actors.messages import Request
from lexshard.actors.states.deltas import NO_DELTAS, Deltas, OpenSequence


@dataclass(frozen=True, slots=True)
class FollowedSequence:
    """A sequence: its request and its tokens, prompt and output (the engine's own list)."""

    request: Request
    history: list[int]

    def opening(self, sequence: int) -> OpenSequence:
        """What tells of it as it is now."""
        output = tuple(self.history[len(self.request.prompt_ids) :])
        parameters = self.request.parameters
        if parameters.grammar is None:
            return OpenSequence(sequence, self.request, output)
        # A grammar is the engine's affair; its masks come with the rows.
        own = replace(self.request, parameters=replace(parameters, grammar=None))
        return OpenSequence(sequence, own, output)


class Follower:
    """The sequences of one process elsewhere."""

    def __init__(self) -> None:
        self.sequences: dict[int, FollowedSequence] = {}
        self._closed: list[int] = []
        self._opened: dict[int, OpenSequence] = {}
        self._appended: list[tuple[int, tuple[int, ...]]] = []

    def open(self, sequence: int, followed: FollowedSequence) -> None:
        """It follows one more."""
        self.sequences[sequence] = followed
        self._opened[sequence] = followed.opening(sequence)

    def append(self, sequence: int, token_ids: tuple[int, ...]) -> None:
        """Tokens have been added to the history of a sequence."""
        if sequence in self._opened:  # it is told of it as it is when it is told
            self._opened[sequence] = self.sequences[sequence].opening(sequence)
        else:
            self._appended.append((sequence, token_ids))

    def close(self, sequence: int) -> FollowedSequence:
        """It follows that one no more."""
        if self._opened.pop(sequence, None) is None:
            self._closed.append(sequence)
        self._appended = [each for each in self._appended if each[0] != sequence]
        return self.sequences.pop(sequence)

    def take(self) -> Deltas:
        """What it has not been told; it is told now."""
        if not (self._closed or self._opened or self._appended):
            return NO_DELTAS
        told = Deltas(tuple(self._closed), tuple(self._opened.values()), tuple(self._appended))
        self._closed, self._opened, self._appended = [], {}, []
        return told

    def anew(self) -> Deltas:
        """All that one must be told which knows nothing; it is told now."""
        self.take()
        return Deltas(opened=tuple(each.opening(name) for name, each in self.sequences.items()))
