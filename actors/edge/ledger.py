"""The books of one text at both ends: what was said, and which batches have no answer yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from uuid import uuid4

from lexshard.actors.edge.frames import NUMBERS, BatchVerdict, FrameCodec, FrameError, GuessBatch
from lexshard.actors.messages import (
    DraftDistribution,
    Drafting,
    Drafts,
    Request,
    SequenceEvent,
    VerifyMode,
    guesses_fell,
    guesses_that_stand,
)

MOST_UNANSWERED = 12  # batches of one text, each of which may hold 255 distributions


class TextLedger:
    """``said`` are prompt and output. Batches have numbers from 1 on, which frames say modulo 64;
    ``last`` is that of the last one."""

    def __init__(self, said: Sequence[int]) -> None:
        self.said = list(said)
        self.last = 0
        self.unanswered: dict[int, GuessBatch] = {}
        self.answered = GuessBatch(0, len(self.said), ())  # last; before the first, none

    def note(self, batch: GuessBatch) -> GuessBatch:
        """The batch, which is on its way from now on, with its number."""
        self.last += 1
        self.unanswered[self.last] = replace(batch, number=self.last)
        return self.unanswered[self.last]

    @property
    def untold(self) -> dict[int, tuple[int, ...]]:
        """The guesses at what is not said yet of each batch that a verdict can be on, by its
        number, in the order in which verdicts count."""
        known, length = (self.answered, *self.unanswered.values()), len(self.said)
        return {
            each.number: each.token_ids[length - each.position :] if each.position <= length else ()
            for each in known
        }

    def told(self, token_ids: Sequence[int], answered: int | None) -> None:
        """The text goes on with ``token_ids``, in answer to batch ``answered``."""
        self.said.extend(token_ids)
        if answered is not None and answered in self.unanswered:
            self.answered = self.unanswered[answered]
            self.unanswered = {n: each for n, each in self.unanswered.items() if n > answered}


class GuessChain(TextLedger):
    """The device's.

    Batches are sent one behind the other, ahead of verdicts on the guess that all before them
    stand. The target takes them up in order; one that does not go on from what it has said
    (`actors.messages.guesses_go_on`) it drops, with those built on it, and the same is done here.
    """

    _dropped = 0  # number of the last batch that was

    def note(self, batch: GuessBatch) -> GuessBatch:
        """It is ahead where others are on their way."""
        return super().note(replace(batch, ahead=bool(self.going)))

    @property
    def going(self) -> list[GuessBatch]:
        """Those that the target will take up, for all we know; without any it waits."""
        return [batch for number, batch in self.unanswered.items() if number > self._dropped]

    @property
    def history(self) -> list[int]:
        """What is said, and what is guessed to follow."""
        tokens = list(self.said)
        for batch in self.going:
            tokens.extend(batch.token_ids[len(tokens) - batch.position :])
        return tokens

    def event_of(self, content: bytes, codec: FrameCodec, request: Request) -> SequenceEvent:
        """What a verdict tells of ``request``. Raises `FrameError` for one that does not fit."""
        untold = self.untold
        verdict = codec.decode_verdict(content, [*map(len, untold.values())])
        number, guesses = [*untold.items()][verdict.batch]
        token_ids = (*guesses[: verdict.stood], *verdict.token_ids)
        return SequenceEvent(request.request_id, request.choice, token_ids, answers=number)

    def told(self, token_ids: Sequence[int], answered: int | None) -> None:
        super().told(token_ids, answered)
        fell = guesses_fell(self.answered.position, self.answered.token_ids, self.said)
        for batch in self.going:
            fell = (fell and batch.ahead) or not batch.goes_on_from(self.said)
            if not fell:
                break
            self._dropped = batch.number


class VerifiedText(TextLedger):
    """The target's, of what is said in answer to ``request``, whose guesses come from outside."""

    def __init__(self, codec: FrameCodec, request: Request) -> None:
        super().__init__((*request.prompt_ids, *request.resumed_ids))
        verify: VerifyMode = "same-token" if codec.mode == "same-token" else "same-distribution"
        self.request = replace(request, drafting=Drafting("client", verify))
        self.codec = codec

    def behind(self, length: int) -> VerifiedText:
        """The text that goes on behind its first ``length`` tokens, as another sequence."""
        said = tuple(self.said[len(self.request.prompt_ids) : length])
        request = replace(self.request, request_id=uuid4().hex, resumed_ids=said)
        return VerifiedText(self.codec, request)

    def arrived(self, batch: GuessBatch) -> Drafts:
        """A batch as the engine hears it. Raises `FrameError` for one that cannot be here, now."""
        due, request = (self.last + 1) % NUMBERS, self.request
        if batch.number != due:
            raise FrameError(f"batch {batch.number} where {due} is the next one")
        if len(self.unanswered) >= MOST_UNANSWERED:
            raise FrameError(f"more than {MOST_UNANSWERED} batches before the first is answered")
        if not 0 <= batch.position - len(request.prompt_ids) <= request.parameters.max_tokens:
            raise FrameError(f"guesses from position {batch.position} on are of no text")
        told = ((each.likely.tolist(), each.logits.tolist()) for each in batch.lattices)
        proposals = tuple(DraftDistribution(tuple(ids), tuple(logits)) for ids, logits in told)
        own, alone = (request.request_id, request.choice, batch.position), batch.alone
        number = self.note(replace(batch, lattices=())).number
        return Drafts(*own, batch.token_ids, proposals, alone, number, batch.ahead)

    def happened(self, event: SequenceEvent) -> bytes | None:
        """The verdict that tells of ``event``; None where that tells more than a verdict can."""
        untold, token_ids = self.untold, event.token_ids
        number = self.answered.number if event.answers is None else event.answers
        self.told(token_ids, event.answers)
        # Of less than eight bits a token could not be told from what fills up the last byte.
        if not is_plain(event) or self.codec.token_bits < 8 or number not in untold:
            return None
        stood = guesses_that_stand(untold[number], token_ids[:-1])
        verdict = BatchVerdict([*untold].index(number), stood, token_ids[stood:])
        return self.codec.encode_verdict(verdict, [*map(len, untold.values())])


def is_plain(event: SequenceEvent) -> bool:
    """Whether it tells of tokens and no more."""
    more = event.logprobs, event.certificates, event.origins, event.timing, event.finish_reason
    return bool(event.token_ids) and not any(more)


def in_few(events: Iterable[SequenceEvent]) -> list[SequenceEvent]:
    """The same of one sequence, tokens in a row that the target drew alone told at once."""
    told: list[SequenceEvent] = []
    for event in events:
        if told and all(is_plain(each) and each.answers is None for each in (told[-1], event)):
            event = replace(event, token_ids=told.pop().token_ids + event.token_ids)
        told.append(event)
    return told
