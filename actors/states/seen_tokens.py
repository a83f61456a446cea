"""The distinct tokens that a sequence has seen, as a sorted list that follows its table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class SeenTokens:
    """Sorted distinct ids. A new one moves those above it, a few bytes for each; to look for all of
    them in a table reads the vocabulary."""

    def __init__(self, ids: Ids) -> None:
        self._memory = np.empty(2 * len(ids) + 64, np.int32)
        self._memory[: len(ids)] = ids
        self._count = len(ids)

    @property
    def ids(self) -> Ids:
        """All of them; holds until the next change."""
        return self._memory[: self._count]

    def add(self, token_id: int) -> None:
        """One that is not there yet."""
        count = self._count
        if count == len(self._memory):
            self._memory = np.concatenate([self._memory, np.empty(count, np.int32)])
        place = int(np.searchsorted(self.ids, token_id))
        self._memory[place + 1 : count + 1] = self._memory[place:count]
        self._memory[place] = token_id
        self._count += 1

    def remove(self, token_id: int) -> None:
        """One that is there."""
        place = int(np.searchsorted(self.ids, token_id))
        self._memory[place : self._count - 1] = self._memory[place + 1 : self._count]
        self._count -= 1
