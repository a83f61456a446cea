"""What clients have been told of every unfinished sequence: enough to go on after a death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lexshard.actors.messages import (
    Drafts,
    FinishReason,
    Request,
    SequenceEvent,
    guesses_fell,
    guesses_that_stand,
)

DEATHS_PER_REQUEST = 2


class JournalStream:
    """The events of the sequences one HTTP request submitted, as they come."""

    def __init__(self, request_ids: Iterable[str], close: Callable[[JournalStream], None]) -> None:
        self.request_ids = tuple(request_ids)
        self._close = close
        self._arrived: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: SequenceEvent) -> None:
        self._arrived.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def arrived(self) -> list[SequenceEvent]:
        """Whatever has come since the last call: at least one event."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Cancel what has not finished. Closing twice is harmless."""
        self._close(self)


@dataclass(slots=True)
class _Entry:
    """One unfinished sequence, whose client has ``received`` tokens, from an earlier request or
    from this one; ``handed_over``: the engine that lives now has been asked for it.
    ``drafts`` from outside no event has answered yet; those that were answered last let it draw
    alone until it has ``alone_to`` tokens, the prompt's with them."""

    request: Request
    stream: JournalStream
    received: list[int] = field(default_factory=list)
    drafts: list[Drafts] = field(default_factory=list)
    answered: int = 0  # number of the last drafts that are
    alone_to: int = 0
    handed_over: bool = False
    deaths: int = 0

    @property
    def said(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.received)

    def drop_drafts(self, event: SequenceEvent) -> None:
        """Those that it answers, and those built on a guess of these that fell, as the engine has:
        behind them there may be others. ``event`` is received."""
        said, fell = self.said, False
        kept: list[Drafts] = []
        for drafts in self.drafts:
            if drafts.number == event.answers:
                before = len(said) - len(event.token_ids)
                guesses = drafts.token_ids[before - drafts.position :]
                stood = guesses_that_stand(guesses, event.token_ids)
                brought = min(stood + 1, len(event.token_ids))
                self.answered, self.alone_to = drafts.number, before + brought + drafts.alone
                fell = guesses_fell(drafts.position, drafts.token_ids, said)
            elif event.answers is None or drafts.number > event.answers:
                fell = fell and drafts.ahead
                kept += () if fell else (drafts,)
        self.drafts = kept

    def handed_on(self) -> list[Drafts]:
        """What a new engine has to be told: first, how far the text goes on alone."""
        length, request = len(self.said), self.request
        left = self.alone_to - length
        if left < 1:
            return self.drafts
        name, choice, number = request.request_id, request.choice, self.answered
        alone = Drafts(name, choice, length, alone=left - 1, number=number)
        return [alone, *self.drafts]


class Journal:
    """Every unfinished sequence with the tokens its client has received."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[int, _Entry]] = {}

    def __bool__(self) -> bool:
        """Whether a sequence is unfinished."""
        return bool(self._entries)

    def enter(self, requests: Sequence[Request], stream: JournalStream) -> None:
        for request in requests:
            entry = _Entry(request, stream, received=list(request.resumed_ids))
            self._entries.setdefault(request.request_id, {})[request.choice] = entry

    def note_drafts(self, drafts: Drafts) -> bool:
        """Whether there is a sequence for them."""
        entry = self._entries.get(drafts.request_id, {}).get(drafts.choice)
        if entry is not None:
            entry.drafts.append(drafts)
        return entry is not None

    def forget(self, request_id: str) -> bool:
        """Whether there was anything of that request."""
        return self._entries.pop(request_id, None) is not None

    def record(self, events: Iterable[SequenceEvent]) -> None:
        """Write down what the engine says and pass it on to the streams."""
        for event in events:
            entries = self._entries.get(event.request_id)
            entry = entries.get(event.choice) if entries else None
            if entry is None:
                continue
            entry.received.extend(event.token_ids)
            if entry.drafts:
                entry.drop_drafts(event)
            if event.finish_reason is not None:
                self._remove(event.request_id, event.choice)
            entry.stream.put(event)

    def continuations(self) -> list[Request]:
        """What a new engine has to be asked, so that every stream goes on where it stopped."""
        return [
            replace(entry.request, resumed_ids=tuple(entry.received))
            for _, _, entry in self._everything()
        ]

    def drafts(self) -> list[Drafts]:
        """The drafts that a new engine has to be told."""
        return [drafts for _, _, entry in self._everything() for drafts in entry.handed_on()]

    def hand_over(self, requests: Iterable[Request]) -> None:
        """An engine has been asked for these."""
        for request in requests:
            self._entries[request.request_id][request.choice].handed_over = True

    def count_death(self) -> None:
        """Count a death against every sequence that the engine had been asked for; one that has
        seen two is taken for the cause. An engine that dies before it is asked for anything has
        another."""
        for request_id, choice, entry in self._everything():
            if not entry.handed_over:
                continue
            entry.handed_over = False
            entry.deaths += 1
            if entry.deaths >= DEATHS_PER_REQUEST:
                self._end(
                    request_id, choice, "error", "the engine died twice while serving this request"
                )

    def end_everything(self, reason: FinishReason, message: str) -> None:
        for request_id, choice, _ in self._everything():
            self._end(request_id, choice, reason, message)

    def refuse(self, requests: Iterable[Request], reason: FinishReason, message: str) -> None:
        """End sequences that have just been entered."""
        for request in requests:
            self._end(request.request_id, request.choice, reason, message)

    def _everything(self) -> Iterator[tuple[str, int, _Entry]]:
        for request_id, entries in list(self._entries.items()):
            for choice, entry in list(entries.items()):
                yield request_id, choice, entry

    def _end(self, request_id: str, choice: int, reason: FinishReason, message: str) -> None:
        entry = self._entries[request_id][choice]
        self._remove(request_id, choice)
        entry.stream.put(SequenceEvent.failure(entry.request, message, reason))

    def _remove(self, request_id: str, choice: int) -> None:
        entries = self._entries[request_id]
        del entries[choice]
        if not entries:
            del self._entries[request_id]
