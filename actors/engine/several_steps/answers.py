"""What a call of several steps asks between two: may another follow, and with which masks?"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np

from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.states.mask import Mask
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.masks import count_of
from lexshard.kernels.steps import FOLLOWING, Caller

# Tokens that must follow one, in a call: what is behind them ends it, and follows at once.
FORCED = 32

_ANSWERING = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class Answers:
    """For calls of several steps of ``sequences``, whose grammars are among ``constraints``. They
    end where something is ``asked`` of the engine, which they see after ``patience``, and after
    ``most_seconds`` of all.

    Each token is its sequence's own as soon as its call has told of it, and what must follow it is
    computed with it. Meanwhile other threads make the masks of several sequences; those of one
    alone are made at once. A call ends before a step of which a mask holds ``fewest`` tokens or
    fewer. ``limits`` are the positions at which sequences have no more room.
    """

    def __init__(
        self,
        constraints: Constraints,
        sequences: Sequence[EngineSequence],
        vocabulary_size: int,
        fewest: int,
        limits: Sequence[int],
        asked: Callable[[], bool],
        patience: float,
        most_seconds: float,
    ) -> None:
        self.broken: dict[EngineSequence, Exception] = {}
        self.goes_on = True
        # Of the last call, by step that was told of: what must follow each of its tokens [N].
        self.forced: list[list[tuple[int, ...]]] = []
        self.ends = False  # whether clients are to be told, or heard, now
        self._constraints = constraints
        self._sequences = sequences
        self._fewest = fewest
        self._limits = limits
        self._asked = asked
        self._patience = patience
        self._looked = time.perf_counter()
        self._deadline = self._looked + most_seconds
        self._alone = len(sequences) == 1
        self._masked = [row for row, each in enumerate(sequences) if each.matcher is not None]
        self._found: tuple[Mask | None, ...] = ()
        self._written = False  # whether the mask of one alone is in its place, and nowhere else
        self._vocabulary_size = vocabulary_size
        self._failure: BaseException | None = None
        self._answering = _ANSWERING(self._answer)
        rows = np.full(len(sequences), -1, np.int64)
        rows[self._masked] = np.arange(len(self._masked))
        self._caller = Caller(
            ctypes.c_void_p.from_buffer(self._answering).value or 0,
            bool(self._masked),
            int(1e9 * patience),
            np.zeros(len(sequences), np.int64),
            np.zeros(len(sequences), np.int64),
            np.zeros((len(sequences), FORCED), np.int64),
            np.zeros((len(self._masked), blocks_of(vocabulary_size)), np.uint64),
            rows,
        )

    def begin(self, pending: Sequence[int]) -> Caller | None:
        """What a call asks, which begins with so many ``pending`` tokens of each sequence behind
        its first. None where these are many, where the masks of its first step are late, or where
        clients are told of them."""
        self.forced, self.goes_on = [], True
        if max(pending) > FORCED:
            return None
        self._caller.lengths[:] = pending
        for row, count in enumerate(pending):
            if count:
                self._caller.behind[row, :count] = self._sequences[row].token_ids[-count:]
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

    def close(self) -> None:
        """No call asks any more. What it could call refers to this, which would keep sequences that
        are gone until garbage is collected."""
        del self._answering

    def _answer(self, question: int) -> int:
        try:
            if question != FOLLOWING:
                return self._is_wide() if self._alone else self._take()
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
        """Whether the masks of the next step are there, in their place, and wide enough."""
        found = self._constraints.begun(self._sequences)
        if not found:
            return False
        self._found, wide = found, True
        for place, row in enumerate(self._masked):
            mask = found[row]
            assert mask is not None
            self._caller.masks[place] = mask.words
            wide &= mask.count > self._fewest
        return wide

    def _is_wide(self) -> bool:
        return not self._fewest or count_of(self._caller.masks[0]) > self._fewest

    def _hear(self) -> bool:
        """Gives sequences the tokens that were drawn, and those that must follow; whether another
        step may. Where one has come to its end by its length, they are not given anything here."""
        self._found, sequences = (), self._sequences
        for sequence in sequences:
            if sequence.output_length + 1 >= sequence.request.parameters.max_tokens:
                return False
        forced: list[tuple[int, ...]] = []
        for row, (sequence, token_id) in enumerate(
            zip(sequences, self._caller.told.tolist(), strict=True)
        ):
            sequence.state.append(token_id)
            own: list[int] = []
            if sequence.matcher is not None:
                try:
                    self.goes_on &= self._constraints.go_on_in_call(sequence, own, FORCED)
                except GrammarError as error:
                    self.broken[sequence], self.goes_on = error, False
                if own:
                    self._caller.behind[row, : len(own)] = own
            self.goes_on &= len(sequence.token_ids) <= self._limits[row]
            forced.append(tuple(own))
        self._caller.lengths[:] = list(map(len, forced))
        self.forced.append(forced)
        if self.goes_on:
            self._begin_masks()
        return self.goes_on

    def _begin_masks(self) -> None:
        if not self._alone:
            self._constraints.begin([self._sequences[row] for row in self._masked], alone=False)
            return
        [sequence], [words] = self._sequences, self._caller.masks
        assert sequence.matcher is not None
        try:
            sequence.matcher.write_mask(words.ctypes.data)
            self._written = True
        except GrammarError as error:
            self.broken[sequence], self.goes_on = error, False
