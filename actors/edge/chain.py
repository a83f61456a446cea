"""One text at the device's end: what the target has said of it, and the guesses on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
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
        self._last = 0  # number

    @property
    def going(self) -> int:
        """How many batches are on their way; without any the target waits."""
        return len(self._going)

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
        numbers = [each for each in self._unanswered if each % NUMBERS == verdict.number]
        if not numbers:
            raise FrameError(f"a verdict on batch {verdict.number}, which is not on its way")
        number = numbers[0]
        batch = self._unanswered[number]
        if verdict.stood > len(batch.token_ids):
            raise FrameError(f"{verdict.stood} of {len(batch.token_ids)} guesses cannot stand")
        text = (*batch.token_ids[: verdict.stood], verdict.token_id)
        before = len(self.said) - batch.position
        if not 0 <= before < len(text) or tuple(self.said[batch.position :]) != text[:before]:
            raise FrameError("a verdict contradicts what was said before")
        self.told(text[before:], number)
        return text[before:], number

    def told(self, token_ids: Sequence[int], answered: int | None) -> None:
        """The text goes on with ``token_ids``, in answer to batch ``answered``."""
        self.said.extend(token_ids)
        if answered is not None:
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
        self._last = 0

    def _goes_on_from_here(self, batch: GuessBatch) -> bool:
        return guesses_go_on(batch.position, batch.token_ids, self.said)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            batch = self._unanswered.pop(number)
            if batch in self._going:
                self._going.remove(batch)
