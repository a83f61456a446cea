"""The target's end of one text: what batches of guesses become, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lexshard.actors.edge.frames import (
    MOST_GUESSES,
    NUMBERS,
    BatchVerdict,
    EdgeMode,
    FrameCodec,
    FrameError,
    GuessBatch,
)
from lexshard.actors.messages import (
    DraftDistribution,
    Drafting,
    Drafts,
    Request,
    SequenceEvent,
)

if TYPE_CHECKING:
    from lexshard.kernels.lattice import Lattice

MOST_UNANSWERED = 12  # batches of one text, each of which may hold 255 distributions


def drafting_of(mode: EdgeMode) -> Drafting:
    """How the sequence of a session in this mode is guessed for."""
    return Drafting("client", "same-token" if mode == "same-token" else "same-distribution")


class VerifiedText:
    """What was said in answer to ``request``, and the batches that are not answered yet."""

    def __init__(self, codec: FrameCodec, request: Request) -> None:
        self.output = list(request.resumed_ids)
        self._codec = codec
        self._request = request
        self._last = 0  # batch: the numbers of frames are modulo 256
        self._unanswered: dict[int, GuessBatch] = {}
        self._answered: GuessBatch | None = None  # last

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self._request.prompt_ids) + len(self.output)

    @property
    def last(self) -> int:
        """The number of the last batch that came."""
        return self._last

    @property
    def unanswered(self) -> tuple[int, ...]:
        """The numbers of the batches that are."""
        return tuple(self._unanswered)

    def arrived(self, content: bytes) -> Drafts:
        """A frame as the engine hears it.

        Raises:
            FrameError: it is none, or one that cannot be here and now.
        """
        batch = self._codec.decode(content)
        number = self._last + 1
        if batch.number != number % NUMBERS:
            raise FrameError(f"batch {batch.number} where {number % NUMBERS} is the next one")
        if len(self._unanswered) >= MOST_UNANSWERED:
            raise FrameError(f"more than {MOST_UNANSWERED} batches before the first is answered")
        first = len(self._request.prompt_ids)
        if not first <= batch.position <= first + self._request.parameters.max_tokens:
            raise FrameError(f"guesses from position {batch.position} on are of no text")
        self._last = number
        self._unanswered[number] = replace(batch, number=number, lattices=())
        proposals = tuple(map(_distribution, batch.lattices))
        return Drafts(
            self._request.request_id,
            self._request.choice,
            batch.position,
            batch.token_ids,
            proposals,
            batch.alone,
            number,
        )

    def happened(self, event: SequenceEvent) -> BatchVerdict | None:
        """The verdict that tells of ``event``, as far as its tokens go; None where none can."""
        self.output.extend(event.token_ids)
        if event.answers is not None:
            self._answered = self._unanswered[event.answers]
            for number in [each for each in self._unanswered if each <= event.answers]:
                del self._unanswered[number]
        batch = self._answered
        if batch is None or not event.token_ids:
            return None
        place = self.length - 1 - batch.position
        if place > MOST_GUESSES:
            return None
        return BatchVerdict(batch.number % NUMBERS, place, event.token_ids[-1])

    def since(self, length: int) -> Sequence[int]:
        """What was said after the first ``length`` tokens of prompt and output. Raises `FrameError`
        for more than were said."""
        told = length - len(self._request.prompt_ids)
        if not 0 <= told <= len(self.output):
            raise FrameError(f"{told} tokens cannot have been heard of {len(self.output)}")
        return self.output[told:]


def _distribution(lattice: Lattice) -> DraftDistribution:
    from lexshard.kernels.lattice import log_counts  # compiles; see `frames`

    ids, logits = log_counts(lattice)
    return DraftDistribution(tuple(ids.tolist()), tuple(logits.tolist()))
