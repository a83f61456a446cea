"""What penalised sequences have seen, one row of counts each: a lookup, never a walk.

A penalty asks of a token only whether it was seen and how often it was generated. So a row has an
entry for every token of the vocabulary: 0 for a token never seen, otherwise 1 + how often it stands
in the output (1: prompt only). Whatever the length of the history, a new token changes one entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Below this share of the vocabulary, entries are cleared one by one.
SPARSE_SHARE = 1 / 64


class PenaltyTables:
    """Rows of counts for ``capacity`` sequences, more when they are all in use.

    ``tables`` [S, V] int32 is what `actors.messages.Adjustment` refers to; it is another array
    after `open` had to make room. The system provides memory for rows as they are first written.
    """

    def __init__(self, vocabulary_size: int, capacity: int) -> None:
        self.tables: npt.NDArray[np.int32] = np.zeros((capacity, vocabulary_size), np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    def open(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """The row of a new sequence that has seen these tokens."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        table = self.tables[row]
        table[np.array(prompt_ids, np.int64)] = 1
        ids, counts = np.unique(np.array(output_ids, np.int64), return_counts=True)
        table[ids] = 1 + counts
        return row

    def append(self, row: int, token_id: int) -> None:
        """Counts one more output token."""
        table = self.tables[row]
        table[token_id] = max(table[token_id], 1) + 1

    def close(self, row: int, token_ids: Sequence[int]) -> None:
        """Gives the row back; ``token_ids`` are all that its sequence has seen."""
        table = self.tables[row]
        if len(token_ids) < SPARSE_SHARE * len(table):
            table[np.array(token_ids, np.int64)] = 0
        else:
            table[:] = 0
        self._free.append(row)

    def _grow(self) -> None:
        capacity, vocabulary_size = self.tables.shape
        larger = np.zeros((2 * capacity, vocabulary_size), np.int32)
        larger[:capacity] = self.tables
        self.tables = larger
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))
