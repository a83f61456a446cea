"""What a call of several steps asks between two: may another follow, and with which masks?"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np

from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.grammar.step_masks import MaskPlace
from lexshard.actors.states.mask import Mask
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.steps import ENDS, FOLLOWING, GOES_ON, MASKS_COME, NO_MASKS, Caller

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
        self._limits = limits
        # With one more token than these an output is as long as it may be.
        self._most = [
            len(each.request.prompt_ids) + each.request.parameters.max_tokens - 1
            for each in sequences
        ]
        self._asked = asked
        self._patience = patience
        self._looked = time.perf_counter()
        self._deadline = self._looked + most_seconds
        self._alone = len(sequences) == 1
        masked = [row for row, each in enumerate(sequences) if each.matcher is not None]
        self._masked = [sequences[row] for row in masked]
        # The masks of the step that a call has come to: of its first one, else in their places.
        self._first: tuple[Mask | None, ...] = ()
        self._written = False
        self._failure: BaseException | None = None
        self._answering = _ANSWERING(self._answer)
        rows = np.full(len(sequences), -1, np.int64)
        rows[masked] = np.arange(len(masked))
        masks = np.zeros((len(masked), blocks_of(vocabulary_size)), np.uint64)
        self._places = [MaskPlace(each, each.ctypes.data, vocabulary_size) for each in masks]
        self._caller = Caller(
            ctypes.c_void_p.from_buffer(self._answering).value or 0,
            NO_MASKS if not masked else GOES_ON if self._alone else MASKS_COME,
            fewest,
            int(1e9 * patience),
            np.zeros(len(sequences), np.int64),
            np.zeros(len(sequences), np.int64),
            np.zeros((len(sequences), FORCED), np.int64),
            masks,
            rows,
        )

    def begin(self, pending: Sequence[int]) -> Caller | None:
        """What a call asks, which begins with so many ``pending`` tokens of each sequence behind
        its first. None where these are many, where the only mask of its first step is not to be
        had, or holds too few, or where clients are told of masks."""
        self.forced, self.goes_on = [], True
        if max(pending) > FORCED:
            return None
        self._caller.lengths[:] = pending
        for row, count in enumerate(pending):
            if count:
                self._caller.behind[row, :count] = self._sequences[row].token_ids[-count:]
        if self._masked:
            if not self._constraints.in_one_call(self._masked):
                return None
            self._constraints.begin(self._masked, alone=self._alone)
            if self._alone and not (self._take_first() and self._is_wide()):
                return None
        return self._caller

    def end(self) -> tuple[Mask | None, ...]:
        """After a call: the masks of the step that it left, if it left one that has some. Raises
        what an answer raised."""
        if self._failure is not None:
            raise self._failure
        found, written = self._first, self._written
        self._first, self._written = (), False
        if not written:
            return found
        masks = {own: each.mask() for own, each in zip(self._masked, self._places, strict=True)}
        return tuple(map(masks.get, self._sequences))

    def close(self) -> None:
        """No call asks any more. What it could call refers to this, which would keep sequences that
        are gone until garbage is collected."""
        del self._answering

    def _answer(self, question: int) -> int:
        try:
            if question != FOLLOWING:
                return GOES_ON if self._take() else ENDS
            follows = self._hear() if self._masked else GOES_ON
            now = time.perf_counter()
            if now - self._looked < self._patience:
                return follows
            self._looked = now
            self.ends = now >= self._deadline or self._asked()
            return ENDS if self.ends else follows
        except BaseException as error:  # there is no caller in Python that it could reach
            self._failure = error
            return ENDS

    def _take(self) -> bool:
        """Whether the masks of the next step are there, in their places."""
        if not self.forced:
            return self._take_first()
        self._written = self._constraints.come(self._masked) is not None
        return self._written

    def _take_first(self) -> bool:
        """As `_take`, of those that were begun before the call."""
        self._first = self._constraints.begun(self._sequences) or ()
        found = [mask for mask in self._first if mask is not None]
        for place, mask in zip(self._places, found, strict=False):
            place.words[:] = mask.words
        return bool(found)

    def _is_wide(self) -> bool:
        [mask] = self._first
        return mask is not None and mask.count > self._caller.fewest

    def _hear(self) -> int:
        """Gives sequences the tokens that were drawn, and those that must follow; whether another
        step may. Where one has come to its end by its length, they are not given anything here."""
        self._first, self._written, sequences = (), False, self._sequences
        for sequence, most in zip(sequences, self._most, strict=True):
            if len(sequence.token_ids) >= most:
                return ENDS
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
                    self._caller.lengths[row] = len(own)
                    self._caller.behind[row, : len(own)] = own
            self.goes_on &= len(sequence.token_ids) <= self._limits[row]
            forced.append(tuple(own))
        self.forced.append(forced)
        if not self.goes_on:
            return ENDS
        if not self._alone:
            self._constraints.begin_in_call(self._masked, self._places)
            return MASKS_COME
        assert sequence.matcher is not None
        try:
            sequence.matcher.write_mask(self._places[0].address)
        except GrammarError as error:
            self.broken[sequence], self.goes_on = error, False
            return ENDS
        self._written = True
        return GOES_ON
