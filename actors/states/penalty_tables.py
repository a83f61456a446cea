"""What penalised sequences have seen, one row of counts each: a lookup, never a walk.

A penalty asks of a token only whether it was seen and how often it was generated. So a row has an
entry for every token of the vocabulary: 0 for a token never seen, otherwise 1 + how often it stands
in the output (1: prompt only). Whatever the length of the history, a new token changes one entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.actors.states.seen_tokens import SeenTokens

# Below this share of the vocabulary, entries are cleared one by one.
SPARSE_SHARE = 1 / 64


class PenaltyTables:
    """Rows of counts for ``capacity`` sequences, more when they are all in use.

    ``tables`` [S, V] int32 is what `actors.states.need.Adjustment` refers to; it is another array
    after `open` had to make room. The system provides memory for rows as they are first written.
    Who asks for the tokens of a row (a GPU's head does) has the list kept from then on.
    """

    def __init__(self, vocabulary_size: int, capacity: int) -> None:
        self.tables: npt.NDArray[np.int32] = np.zeros((capacity, vocabulary_size), np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._seen: dict[int, SeenTokens] = {}  # by row, where they were asked for

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

    def copy(self, row: int) -> int:
        """A new row that has seen what ``row`` has."""
        if not self._free:
            self._grow()
        other = self._free.pop()
        self.tables[other] = self.tables[row]
        return other

    def seen(self, row: int) -> npt.NDArray[np.int32]:
        """The sorted ids of the tokens that ``row`` has seen; holds until the row changes."""
        kept = self._seen.get(row)
        if kept is None:
            kept = self._seen[row] = SeenTokens(np.flatnonzero(self.tables[row]).astype(np.int32))
        return kept.ids

    def append(self, row: int, token_id: int) -> int:
        """Counts one more output token; the entry of before, by which `take_back` undoes it."""
        table = self.tables[row]
        before = int(table[token_id])
        table[token_id] = max(before, 1) + 1
        if not before and row in self._seen:
            self._seen[row].add(token_id)
        return before

    def take_back(self, row: int, token_id: int, before: int) -> None:
        """Undoes the last `append` that has not been undone."""
        self.tables[row, token_id] = before
        if not before and row in self._seen:
            self._seen[row].remove(token_id)

    def close(self, row: int, token_ids: Sequence[int]) -> None:
        """Gives the row back; ``token_ids`` are all that its sequence has seen."""
        table = self.tables[row]
        if len(token_ids) < SPARSE_SHARE * len(table):
            table[np.array(token_ids, np.int64)] = 0
        else:
            table[:] = 0
        self._seen.pop(row, None)
        self._free.append(row)

    def _grow(self) -> None:
        capacity, vocabulary_size = self.tables.shape
        larger = np.zeros((2 * capacity, vocabulary_size), np.int32)
        larger[:capacity] = self.tables
        self.tables = larger
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))


class TableAhead:
    """A row of counts for one row of a step that assumes guessed tokens.

    It follows the row ``own`` of its sequence, ``length`` tokens of whose history it has seen, and
    shows the guesses on top of it; the next time these are taken back first. So what it costs is
    the new tokens and the guesses, not the vocabulary.
    """

    def __init__(self, tables: PenaltyTables, own: int, length: int) -> None:
        self._tables = tables
        self._row = tables.copy(own)
        self._length = length
        self._guesses: list[tuple[int, int]] = []  # with the entries of before

    def show(self, history: Sequence[int], guesses: Sequence[int]) -> int:
        """The row, which now has seen ``history`` and then ``guesses``."""
        self._take_back()
        for token_id in history[self._length :]:
            self._tables.append(self._row, token_id)
        self._length = len(history)
        self._guesses = [
            (token_id, self._tables.append(self._row, token_id)) for token_id in guesses
        ]
        return self._row

    def close(self, history: Sequence[int]) -> None:
        """Gives the row back; ``history`` are all tokens that its sequence has seen."""
        self._take_back()
        self._tables.close(self._row, history)

    def _take_back(self) -> None:
        while self._guesses:
            self._tables.take_back(self._row, *self._guesses.pop())
