"""Prompt look-up: what followed the last time the same few tokens stood in the text.

An n-gram drafter (Saxena, "Prompt lookup decoding") without a model: strong where the output
repeats its prompt, free elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.drafter.task import Draft, DraftTask


class _Index:
    """Where every n-gram of one history was followed by a token, the last time."""

    def __init__(self, lengths: Sequence[int]) -> None:
        # By length of the n-gram, longest first: n-gram -> the place of the token behind it.
        self._places: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}
        self._indexed = 0  # n-grams that end before this place are known

    def catch_up(self, history: list[int]) -> None:
        """Add the n-grams that have a token behind them by now."""
        last = len(history) - 1
        for length, places in self._places.items():
            first = max(self._indexed, length - 1)  # where the first new n-gram ends
            own = history[first - length + 1 : last]
            shifted = (own[offset:] for offset in range(length))
            grams = zip(*shifted, strict=False)
            places.update(zip(grams, range(first + 1, last + 1), strict=True))
        self._indexed = max(self._indexed, last)

    def find(self, history: list[int]) -> int | None:
        """What followed the longest known n-gram at the end of ``history``."""
        for length, places in self._places.items():
            place = places.get(tuple(history[-length:]))
            if place is not None:
                return place
        return None


class LookupDrafter:
    """Guesses what followed the most recent earlier occurrence of the longest of the last
    ``longest`` to ``shortest`` tokens. Raises ValueError unless ``1 <= shortest <= longest``.

    Each token is indexed once, when its sequence is first drafted for after it.
    """

    name = "lookup"

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {longest} down to {shortest} tokens: give 1 or more")
        self._lengths = range(longest, shortest - 1, -1)
        self._indices: dict[int, _Index] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """See `actors.drafter.protocol.Drafter`. It is certain of every guess."""
        return [Draft(self._guess(task) if task.most > 0 else []) for task in tasks]

    def forget(self, sequence: int) -> None:
        """See `actors.drafter.protocol.Drafter`."""
        self._indices.pop(sequence, None)

    def _guess(self, task: DraftTask) -> list[int]:
        index = self._indices.get(task.sequence)
        if index is None:
            index = self._indices[task.sequence] = _Index(self._lengths)
        index.catch_up(task.history)
        place = index.find(task.history)
        return [] if place is None else task.history[place : place + task.most]
