"""What a call of several steps asks between two: may another follow, and with which masks?"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.states.mask import Mask
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.steps import FOLLOWING, Caller

# Where of texts that must come next there are so many bytes, of all sequences together, a call ends
# and they are computed at once: fewer are drawn token by token beside the others.
AHEAD = 16

_ANSWERING = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class Answers:
    """For calls of several steps of ``sequences``, whose grammars are among ``constraints``. They
    end where something is ``asked`` of the engine, which they see after ``patience``, and after
    ``most_seconds`` of all.

    While the body computes, other threads make the masks of several sequences; those of one alone
    are made at once, and its call ends where its grammar says what follows.
    """

    def __init__(
        self,
        constraints: Constraints,
        sequences: Sequence[EngineSequence],
        vocabulary_size: int,
        asked: Callable[[], bool],
        patience: float,
        most_seconds: float,
    ) -> None:
        self.broken: dict[EngineSequence, Exception] = {}
        self.goes_on = True
        self.heard = 0  # steps of the last call of whose tokens the grammars have heard
        self.ends = False  # whether clients are to be told, or heard, now
        self._constraints = constraints
        self._sequences = sequences
        self._asked = asked
        self._patience = patience
        self._looked = time.perf_counter()
        self._deadline = self._looked + most_seconds
        self._alone = len(sequences) == 1
        self._masked = [row for row, each in enumerate(sequences) if each.matcher is not None]
        self._found: tuple[Mask | None, ...] = ()
        self._much_ahead = False
        self._written = False  # whether the mask of one alone is in its place, and nowhere else
        self._vocabulary_size = vocabulary_size
        self._failure: BaseException | None = None
        self._answering = _ANSWERING(self._answer)
        rows = np.full(len(sequences), -1, np.int64)
        rows[self._masked] = np.arange(len(self._masked))
        self._caller = Caller(
            ctypes.cast(self._answering, ctypes.c_void_p).value or 0,
            bool(self._masked),
            int(1e9 * patience),
            np.zeros(len(sequences), np.int64),
            np.zeros((len(self._masked), blocks_of(vocabulary_size)), np.uint64),
            rows,
        )

    def begin(self) -> Caller | None:
        """Whom a call asks. None where the masks of its first step are late, or clients are told of
        them."""
        self.heard, self.goes_on = 0, True
        if self._masked:
            own = [self._sequences[row] for row in self._masked]
            if not self._constraints.in_one_call(own):
                return None
            self._constraints.begin(own, alone=self._alone)
            if not self._take():
                return None
        return self._caller

    def end(self) -> tuple[Mask | None, ...]:
        """After a call: the masks of the step that it left, if it left one that has some. Raises
        what an answer raised."""
        if self._failure is not None:
            raise self._failure
        found, self._found = self._found, ()
        if self._written:
            self._written = False
            found = (Mask(self._caller.masks[0].copy(), self._vocabulary_size),)
        return found

    def _answer(self, question: int) -> int:
        try:
            if question != FOLLOWING:
                return self._alone or self._take()
            follows = not self._masked or self._hear()
            now = time.perf_counter()
            if now - self._looked < self._patience:
                return follows
            self._looked = now
            self.ends = now >= self._deadline or self._asked()
            return follows and not self.ends
        except BaseException as error:  # there is no caller in Python that it could reach
            self._failure = error
            return False

    def _take(self) -> bool:
        """Whether the masks of the next step are there, in their place."""
        found = self._constraints.begun(self._sequences)
        if not found:
            return False
        self._found = found
        ahead = 0
        for place, row in enumerate(self._masked):
            mask, matcher = found[row], self._sequences[row].matcher
            assert mask is not None
            assert matcher is not None
            self._caller.masks[place] = mask.words
            ahead += matcher.ahead
        self._much_ahead = ahead >= AHEAD
        return True

    def _hear(self) -> bool:
        """Tells grammars of the tokens that were drawn; whether another step may follow."""
        self._found = ()
        if self._much_ahead:
            return False
        self.heard += 1
        tokens: list[Any] = self._caller.told.tolist()
        if not self._alone:
            self._constraints.follow({self._sequences[row]: tokens[row] for row in self._masked})
            return True
        [sequence], [words] = self._sequences, self._caller.masks
        assert sequence.matcher is not None
        try:
            self.goes_on = sequence.matcher.follow(tokens[0], words.ctypes.data)
        except GrammarError as error:
            self.broken[sequence], self.goes_on = error, False
        self._written = self.goes_on
        return self.goes_on
