"""What a step computes: some tokens of each of some sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat

from lexshard.actors.engine.prompt_scores import SCORED_ROW_TOKENS
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.messages import TokenOrigin, guesses_that_stand
from lexshard.actors.proposal import GuessTest

# What drawing a token from a row costs beyond computing it, in tokens of a step: measured on the
# demo, and what the paper suggests.
DRAWN_ROW_TOKENS = 1
NO_ROWS = range(0)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """``count`` tokens of one sequence from position ``start`` on.

    Its last ``draws`` rows draw a token each: the first of them for the token after the sequence's
    own, the others for those after one more of the ``drafted`` tokens each, which are the last
    tokens of the chunk. None draws while the chunk does not catch up with the sequence.
    ``scored`` are the positions whose rows score the prompt token that follows. In a run
    (`actors.engine.several_steps.runs`) its sequence has ``said`` so many of its tokens already,
    with those that a grammar ``forced`` behind each that it drew.
    """

    sequence: Sequence
    start: int
    count: int
    draws: int
    scored: range
    drafted: tuple[int, ...] = ()
    said: int = 0
    forced: tuple[tuple[int, ...], ...] = ()

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + self.count

    def goes_on(self, place: int, token_id: int) -> bool:
        """Whether its row behind ``place``, which drew ``token_id``, is of the text that it is."""
        return bool(self.said) or self.drafted[place : place + 1] == (token_id,)

    def tests(self) -> list[GuessTest]:
        """What its rows but the last test by distributions; none where they draw."""
        sequence = self.sequence
        if not self.drafted or not sequence.tests_guesses:
            return []
        proposals = sequence.proposals or repeat(None)
        exactly = sequence.verify == "same-distribution"
        return list(map(GuessTest, self.drafted, proposals, repeat(exactly)))

    def stood(self, token_ids: tuple[int, ...]) -> int:
        """How many of its guesses stand where its rows drew ``token_ids``."""
        return guesses_that_stand(self.drafted, token_ids)

    def origins(self, token_ids: tuple[int, ...], drafter_name: str) -> tuple[TokenOrigin, ...]:
        """Where each of the tokens that it drew came from."""
        origins = []
        for place, token_id in enumerate(token_ids):
            guess = self.drafted[place] if place < len(self.drafted) else None
            stood = guess == token_id
            origins.append(TokenOrigin(drafter_name if stood else None, None if stood else guess))
        return tuple(origins)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the next step computes, or a run of so many ``steps`` has."""

    chunks: tuple[Chunk, ...]
    steps: int = 1

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step while it is planned."""

    budget: int  # what is left of the step's tokens
    draws: int  # how many more sequences may draw
    served: int = 0  # to the client whose turn it is
    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    admits: bool = True

    def put(self, chunk: Chunk, planned: int = 0) -> int:
        """``chunk`` is part of the step, of which ``planned`` tokens already were; what it adds to
        the cost."""
        cost = chunk.sequence.cost(planned, chunk.count)
        self.chunks[chunk.sequence] = chunk
        self.budget -= cost
        self.served += cost
        if chunk.draws:
            self.draws -= 1
            self.served += _drawing_cost(chunk)
        return cost

    def drop(self, sequence: Sequence) -> int:
        """The sequence is not part of the step after all; what its client was not served then."""
        chunk = self.chunks.pop(sequence, None)
        if chunk is None:
            return 0
        cost = sequence.cost(0, chunk.count)
        self.budget += cost
        return cost + _drawing_cost(chunk)


def _drawing_cost(chunk: Chunk) -> int:
    """What its draws cost beyond the rows that are computed, in tokens of a step."""
    wanted = chunk.sequence.request.parameters.logprobs
    return chunk.draws * (DRAWN_ROW_TOKENS if wanted is None else SCORED_ROW_TOKENS)


def next_chunk(sequence: Sequence, count: int) -> Chunk:
    """The next ``count`` tokens of a sequence."""
    start, stop = sequence.computed, sequence.computed + count
    beyond = stop - len(sequence.token_ids)
    return Chunk(
        sequence=sequence,
        start=start,
        count=count,
        draws=beyond + 1 if beyond >= 0 and sequence.request.parameters.max_tokens > 0 else 0,
        scored=NO_ROWS if sequence.scores is None else sequence.scores.missing(start, stop),
        drafted=tuple(sequence.drafted[:beyond]) if beyond > 0 else (),
    )
