"""One text at the device's end: what the target has said of it, and the guesses on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from lexshard.actors.edge.frames import NUMBERS, BatchVerdict, FrameError, GuessBatch
from lexshard.actors.messages import guesses_go_on


class GuessChain:
    """``said`` are prompt and output as far as the target has told of them.

    Batches are sent one behind the other, each on the guess that all before it stand. The target
    takes them up in order; one that does not go on from what it has said it drops, with all that
    have come until then (`actors.messages.guesses_go_on`), and the same is done here. One that it
    took up all the same, because it came later than it was dropped here, is heard, too.
    """

    def __init__(self, said: Sequence[int]) -> None:
        self.said = list(said)
        self._going: deque[GuessBatch] = deque()  # the target will take them up, for all we know
        self._unanswered: dict[int, GuessBatch] = {}  # by number, those that were dropped, too
        self._answered: GuessBatch | None = None  # last
        self._last = 0  # number

    @property
    def going(self) -> int:
        """How many batches are on their way; without any the target waits."""
        return len(self._going)

    @property
    def alone(self) -> bool:
        """Whether the target will go on alone after one of them."""
        return any(batch.alone for batch in self._going)

    @property
    def answered(self) -> int | None:
        """The number of the last batch that was."""
        return None if self._answered is None else self._answered.number

    @property
    def granted(self) -> int:
        """How many tokens the last batch that was answered lets the target draw alone."""
        return 0 if self._answered is None else self._answered.alone

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def history(self) -> list[int]:
        """What is said, and what is guessed to follow."""
        tokens = list(self.said)
        for batch in self._going:
            tokens.extend(batch.token_ids[len(tokens) - batch.position :])
        return tokens

    def goes_on(self, batch: GuessBatch) -> bool:
        """Whether it still is a batch for the end of `history`, or was one before the target told
        more."""
        return guesses_go_on(batch.position, batch.token_ids, self.history)

    def send(self, batch: GuessBatch) -> GuessBatch:
        """The batch, which is on its way from now on, with its number."""
        self._last += 1
        batch = replace(batch, number=self._last)
        self._going.append(batch)
        self._unanswered[batch.number] = batch
        return batch

    def heard(self, verdict: BatchVerdict) -> tuple[tuple[int, ...], int]:
        """The tokens that it tells of, and the number of the batch that it answers. Raises
        `FrameError` for one that does not fit."""
        batch = next(
            (each for each in self._known() if each.number % NUMBERS == verdict.number), None
        )
        if batch is None:
            raise FrameError(f"a verdict on batch {verdict.number}, which is not on its way")
        before = len(self.said) - batch.position
        guesses = batch.token_ids[: verdict.place]
        if verdict.place == before:
            new: tuple[int, ...] = (verdict.token_id,)
        elif 0 <= before < len(guesses) == verdict.place and (
            guesses[:before] == tuple(self.said[batch.position :])
        ):
            new = (*guesses[before:], verdict.token_id)
        else:
            raise FrameError("a verdict contradicts what was said before")
        self.told(new, batch.number)
        return new, batch.number

    def _known(self) -> Iterator[GuessBatch]:
        """The batches that a verdict may be about."""
        if self._answered is not None:
            yield self._answered
        yield from self._unanswered.values()

    def told(self, token_ids: Sequence[int], answered: int | None) -> None:
        """The text goes on with ``token_ids``, in answer to batch ``answered``."""
        self.said.extend(token_ids)
        if answered in self._unanswered:
            self._answered = self._unanswered[answered]
            self._forget(number for number in list(self._unanswered) if number <= answered)
        if self._going and not self._goes_on_from_here(self._going[0]):
            self._going.clear()

    def resumed(self, last: int, unanswered: Collection[int]) -> None:
        """After a lost connection, when all is told that it has cost: the number of the ``last``
        batch that the target has got, and of those it has not answered. What else was on its way is
        lost."""
        self._last = last
        self._forget(number for number in list(self._unanswered) if number not in unanswered)
        if self._going and not self._goes_on_from_here(self._going[0]):
            self._going.clear()

    def restarted(self) -> None:
        """The text goes on in another session: what was on its way is lost."""
        self._going.clear()
        self._unanswered.clear()
        self._answered = None
        self._last = 0

    def _goes_on_from_here(self, batch: GuessBatch) -> bool:
        return guesses_go_on(batch.position, batch.token_ids, self.said)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            batch = self._unanswered.pop(number)
            if batch in self._going:
                self._going.remove(batch)
