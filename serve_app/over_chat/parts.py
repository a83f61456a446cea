"""From what a chat says to the reply of another protocol: reasoning, text and calls of tools, one
part after the other, whole or as events that are known by their ``type``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import orjson

from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.choice import Delta
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.response_writer import ReplyWriter, receipt_of
from lexshard.serve_app.tools.reply_reader import PartKind

Event = dict[str, Any]


@dataclass(slots=True)
class ReplyPart:
    """One part of a reply: ``text`` of a call is its arguments, as JSON, or, where it is of a
    ``custom`` tool, its input; ``name`` and ``call_id`` are of calls alone. ``logprobs`` are
    entries of OpenAI's, of text alone."""

    kind: PartKind
    index: int
    name: str = ""
    call_id: str = ""
    custom: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartsWriter(ReplyWriter):
    """Writes one reply of one choice, whose log-probabilities are as ``chat`` writes them.
    ``finish_reason`` and ``stop_reason``, the stop string that ended it, are None until they are
    told, and so are ``usage``, in a chat completion's words, and the ``receipt``; ``called``, that
    it calls tools, is false. ``notes`` are a field of every reply: what was asked of it and left to
    the model, where there is such. A subclass has the protocol's words."""

    def __init__(self, chat: ChatWriter) -> None:
        super().__init__(chat.options)
        self.parts: list[ReplyPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.called = False
        self.usage: dict[str, Any] | None = None
        self.receipt: dict[str, Any] | None = None
        self.notes = {"constraint_notes": chat.notes} if chat.notes else {}
        self._chat = chat
        self._has_begun = False
        self._unsaid: list[dict[str, Any]] = []  # of tokens whose text is held back

    @abstractmethod
    def begun(self) -> list[Event]:
        """The events that a stream begins with."""

    @abstractmethod
    def part_begun(self, part: ReplyPart) -> list[Event]: ...

    @abstractmethod
    def part_added(self, part: ReplyPart, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """``text`` is never empty."""

    @abstractmethod
    def part_ended(self, part: ReplyPart) -> list[Event]: ...

    @abstractmethod
    def ended(self) -> list[Event]:
        """The events that end a stream; `reply` is whole then."""

    @abstractmethod
    def reply(self) -> dict[str, Any]:
        """The reply, as far as it has been told."""

    @abstractmethod
    def failure(self, error: ApiError) -> list[Event]:
        """The events that end a stream that fails."""

    def events(self, deltas: Sequence[Delta], usage: dict[str, Any] | None) -> bytes:
        self.usage = usage
        return _written([*self._begin(), *(each for delta in deltas for each in self._take(delta))])

    def end(self, usage: dict[str, Any]) -> bytes:
        return _written(self._end(usage))

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._take(delta)

    def whole(self, usage: dict[str, Any]) -> bytes:
        self._end(usage)
        return orjson.dumps(self.reply())

    def failed(self, error: ApiError) -> bytes:
        return _written(self.failure(error))

    def _begin(self) -> list[Event]:
        if self._has_begun:
            return []
        self._has_begun = True
        return self.begun()

    def _end(self, usage: dict[str, Any]) -> list[Event]:
        self.usage = usage
        return [*self._begin(), *self._end_part(), *self.ended()]

    def _take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._told("reasoning", delta.reasoning, [])
        scores = iter(self._text_scores(delta))
        for part in delta.parts:
            if isinstance(part, str):
                events += self._told("text", part, next(scores, []))
                continue
            if part.name is not None:
                called = part.name, part.call_id or "", part.custom
                events += self._begin_part(ReplyPart("call", len(self.parts), *called))
            if part.text:
                events += self._add(part.text, [])
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.called = delta.choice.called
            stop = delta.choice.stop_reason
            self.stop_reason = stop if isinstance(stop, str) else None
            self.receipt = receipt_of(delta)
        return events

    def _text_scores(self, delta: Delta) -> list[list[dict[str, Any]]]:
        """Log-probabilities of the tokens that say each text of ``delta``; some may have come
        before."""
        told = self._chat.logprobs(delta)
        if told is None:
            return []
        self._unsaid += told["content"]
        own: list[list[dict[str, Any]]] = []
        before: PartKind | None = None
        for kind, tokens in delta.said:
            if kind == "text" and before == "text":
                own[-1] += self._unsaid[:tokens]
            elif kind == "text":
                own.append(self._unsaid[:tokens])
            before = kind
            del self._unsaid[:tokens]
        texts = sum(isinstance(part, str) for part in delta.parts)
        own[texts - 1 :] = [list(chain.from_iterable(own[texts - 1 :]))]
        return own

    def _told(self, kind: PartKind, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if not self.parts or self.parts[-1].kind != kind:
            events = self._begin_part(ReplyPart(kind, len(self.parts)))
        return [*events, *self._add(text, logprobs)]

    def _begin_part(self, part: ReplyPart) -> list[Event]:
        ended = self._end_part()
        self.parts.append(part)
        return [*ended, *self.part_begun(part)]

    def _end_part(self) -> list[Event]:
        """Ends what is open."""
        if not self.parts or self.parts[-1].ended:
            return []
        self.parts[-1].ended = True
        return self.part_ended(self.parts[-1])

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        part = self.parts[-1]
        part.pieces.append(text)
        part.logprobs += logprobs
        return self.part_added(part, text, logprobs)


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
        for event in events
    )
