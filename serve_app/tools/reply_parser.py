"""From the text of a reply, as it comes, to what it thinks, says, and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from lexshard.serve_app.tools.calls import CallPiece, CallReader
from lexshard.serve_app.tools.families import ReplyFormat
from lexshard.serve_app.tools.offer import OfferedTool
from lexshard.serve_app.tools.text_buffer import (
    MalformedCallError,
    Reading,
    TextBuffer,
)

LINE_END = "\n"


class Spoken(msgspec.Struct, frozen=True):
    """What one piece of text adds to a reply, without its marks: what is thought, and behind that
    ``parts``, text and pieces of calls in their order."""

    reasoning: str
    parts: Sequence[str | CallPiece]

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPiece]:
        return [part for part in self.parts if not isinstance(part, str)]


class ReplyParser:
    """Reads one reply of a model of ``format``, to which ``tools`` were offered: none, no calls.
    ``thinking``: the prompt ends amid what the model thinks; ``thinks`` is false where the prompt
    says that it must not.

    However the text is cut, the same comes of it. What may still be a mark is held back, no more.
    A mark that is one of the model's tokens is that token alone: spelled by others it is text.
    Line ends around what is thought, and white space around calls, belong to the marks. What looks
    like a call of no tool that was offered, or is broken before its arguments begin, is content; of
    one that breaks off later, the arguments are left as they stand.
    """

    def __init__(
        self,
        format: ReplyFormat,
        tools: Mapping[str, OfferedTool],
        thinking: bool = False,
        thinks: bool = True,
    ) -> None:
        self._buffer = TextBuffer(format.token_ids)
        self._by_id = {token_id: mark for mark, token_id in format.token_ids.items()}
        self._reasoning: list[str] = []
        self._parts: list[str | CallPiece] = []
        self._marks = format.reasoning if thinks or thinking else None
        self._thinking = thinking
        self._family = format.tools if tools else None
        self._calls: CallReader | None = None
        if self._family is not None:
            self._calls = CallReader(self._buffer, self._family, tools, self._piece)
        self._run = self._reply()
        self._done = False

    def token(self, token_id: int, length: int) -> None:
        """Tells of each token, before its text is fed, how long the reply is with it."""
        mark = self._by_id.get(token_id)
        if mark is not None:
            self._buffer.noted.append((length - len(mark), mark))

    def feed(self, text: str, last: bool = False) -> Spoken:
        """Takes the next piece of the reply; nothing may follow the ``last`` one."""
        self._buffer.append(text)
        self._buffer.ended = last
        if not self._done:
            self._done = next(self._run, self) is self
        reasoning, self._reasoning = self._reasoning, []
        parts, self._parts = self._parts, []
        return Spoken("".join(reasoning), parts)

    @property
    def amid_call(self) -> bool:
        """Whether the call that began last is not there to its end."""
        return self._calls is not None and not self._calls.whole

    def _reply(self) -> Reading[None]:
        buffer = self._buffer
        thought = self._thinking
        if self._marks is not None and not thought:
            thought = yield from buffer.take(self._marks.opening, after_space=True)
        if thought:
            assert self._marks is not None
            yield from buffer.skip(LINE_END)
            yield from buffer.until(self._marks.closing, self._reasoning_piece, _without_line_ends)
            yield from buffer.skip(LINE_END)
        if self._calls is None or self._family is None:
            yield from self._text()
        elif self._family.bare:
            yield from self._calls_first(self._calls)
        else:
            yield from self._text_with_calls(self._calls)

    def _reasoning_piece(self, text: str) -> None:
        self._reasoning.append(text)

    def _piece(self, piece: str | CallPiece) -> None:
        self._parts.append(piece)

    def _say(self, end: int) -> None:
        """What comes before the place ``end`` is content."""
        buffer = self._buffer
        if end > buffer.position:
            self._parts.append(buffer.text[buffer.position : end])
        buffer.position = end

    def _text(self) -> Reading[None]:
        while True:
            self._say(len(self._buffer.text))
            if self._buffer.ended:
                return
            yield

    def _calls_first(self, calls: CallReader) -> Reading[None]:
        """Calls are at the beginning, or nowhere."""
        assert self._family is not None
        buffer = self._buffer
        buffer.pinned = buffer.position
        if self._family.opening:
            yield from buffer.take(self._family.opening, after_space=True)
        yield from self._read_calls(calls)
        if calls.told:
            yield from buffer.skip()
        yield from self._text()

    def _text_with_calls(self, calls: CallReader) -> Reading[None]:
        assert self._family is not None
        buffer, opening = self._buffer, self._family.opening
        while True:
            at = yield from buffer.before(opening, self._piece, str.rstrip)
            if at is None:
                rest = buffer.rest
                self._say(buffer.position + len(rest.rstrip() if calls.told else rest))
                return
            self._say(buffer.position + len(buffer.text[buffer.position : at].rstrip()))
            yield from self._call_at(at, calls)

    def _call_at(self, at: int, calls: CallReader) -> Reading[None]:
        """Reads the calls that begin with the mark at ``at``, before which there may be space. What
        turns out to be no call is content as far as the mark, and looked at again behind it."""
        assert self._family is not None
        buffer = self._buffer
        buffer.pinned = buffer.position
        buffer.position = at + len(self._family.opening)
        marked = buffer.position - buffer.pinned
        yield from self._read_calls(calls, marked)

    def _read_calls(self, calls: CallReader, marked: int = 0) -> Reading[None]:
        """Where there is none, so many characters from the pin on are content. What is pinned once
        calls were told is of another that is none, behind the mark."""
        buffer, told = self._buffer, calls.told
        try:
            yield from calls.calls()
        except MalformedCallError:
            if buffer.pinned is not None:
                buffer.position = buffer.pinned
                if calls.told == told:
                    self._say(buffer.pinned + marked)
            calls.give_up()
        buffer.pinned = None


def _without_line_ends(text: str) -> str:
    return text.rstrip(LINE_END)
