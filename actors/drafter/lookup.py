"""Prompt look-up: what followed the last time the same few tokens stood in the text.

An n-gram drafter (Saxena, "Prompt lookup decoding") without a model: strong where the output
repeats its prompt, free elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from lexshard.actors.drafter.task import Draft, DraftTask

LENGTHS = (4, 3, 2)  # of n-grams, longest first
# A token takes 8 us and 420 bytes to index, in the engine's own thread.
TOKENS_PER_CALL = 4_096
TOKENS_PER_SEQUENCE = 32_768  # the last ones, where there are more
TOKENS_IN_ALL = 262_144


class _Index:
    """Where every n-gram of the end of one history was followed by a token, the last time.

    What is too old goes in halves: ``_places`` have up to half of `TOKENS_PER_SEQUENCE`, and
    ``_older`` those of the half before.
    """

    def __init__(self) -> None:
        self._places = self._nothing()
        self._older = self._nothing()
        self._begin: int | None = None  # of what ``_places`` know
        self._end = 0  # n-grams that end before this place are known
        self.size = 0

    def _nothing(self) -> dict[int, dict[tuple[int, ...], int]]:
        """By length of the n-gram, longest first: n-gram -> the place of the token behind it."""
        return {length: {} for length in LENGTHS}

    def catch_up(self, history: list[int], most: int) -> int:
        """Add ``most`` n-grams that have a token behind them by now; how many were added."""
        last = len(history) - 1
        if self._begin is None:
            self._begin = self._end = max(0, last - TOKENS_PER_SEQUENCE)
        stop = min(last, self._end + most)
        for length, places in self._places.items():
            first = max(self._end, length - 1)  # where the first new n-gram ends
            own = history[first - length + 1 : stop]
            shifted = (own[offset:] for offset in range(length))
            grams = zip(*shifted, strict=False)
            places.update(zip(grams, range(first + 1, stop + 1), strict=True))
        added = max(0, stop - self._end)
        self._end += added
        self.size += added
        if self._end - self._begin >= TOKENS_PER_SEQUENCE // 2:
            self.size = self._end - self._begin
            self._older, self._places = self._places, self._nothing()
            self._begin = self._end
        return added

    def find(self, history: list[int]) -> int | None:
        """What followed the longest known n-gram at the end of ``history``."""
        for length in LENGTHS:
            gram = tuple(history[-length:])
            place = self._places[length].get(gram) or self._older[length].get(gram)
            if place is not None:
                return place
        return None


class LookupDrafter:
    """Guesses what followed the most recent earlier occurrence of the last four tokens, else of
    the last three or two.

    Each token is indexed once, after its sequence was first drafted for. Of a long prompt a call
    indexes a part, so that no step waits for it.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """See `actors.drafter.protocol.Drafter`. It is certain of every guess."""
        held = sum(index.size for index in self._indices.values())
        room = TOKENS_IN_ALL - held
        left = min(TOKENS_PER_CALL, room)
        drafts = []
        for task in tasks:
            guesses: list[int] = []
            if task.most > 0:
                index = self._indices.get(task.sequence)
                if index is None:
                    index = self._indices[task.sequence] = _Index()
                left -= index.catch_up(task.history, left)
                place = index.find(task.history)
                if place is not None:
                    guesses = task.history[place : place + task.most]
            drafts.append(Draft(guesses, reads=left <= 0 < room))
        return drafts

    def forget(self, sequence: int) -> None:
        """See `actors.drafter.protocol.Drafter`."""
        self._indices.pop(sequence, None)
