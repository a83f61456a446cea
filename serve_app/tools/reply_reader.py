"""What a reply says, and which of its tokens say it."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Literal

from msgspec.structs import replace

from lexshard.serve_app.tools.calls import CallPiece
from lexshard.serve_app.tools.reply_parser import ReplyParser, Spoken

PartKind = Literal["reasoning", "text", "call"]
# So many of a reply's next tokens are of such a part.
Run = tuple[PartKind, int]


class SpokenSum:
    """Adds up what is spoken, in little more memory than its characters take: what follows in the
    same text, or in the same call, is no part of its own."""

    def __init__(self) -> None:
        self._reasoning = StringIO()
        self._parts: list[tuple[CallPiece | None, StringIO]] = []

    def add(self, reasoning: str, parts: Iterable[str | CallPiece]) -> None:
        self._reasoning.write(reasoning)
        for part in parts:
            call = None if isinstance(part, str) else part
            goes_on = self._parts and (self._parts[-1][0] is None) == (call is None)
            if not goes_on or (call is not None and call.name is not None):
                self._parts.append((call, StringIO()))
            self._parts[-1][1].write(part if isinstance(part, str) else part.text)

    def spoken(self) -> Spoken:
        texts = ((call, text.getvalue()) for call, text in self._parts)
        parts = [text if call is None else replace(call, text=text) for call, text in texts]
        return Spoken(self._reasoning.getvalue(), parts)


class ReplyReader:
    """Reads one reply, by ``parser`` where it may be more than text.

    Tokens belong to what is said when their text is read, or, if it is held back then, when that is
    said or turns out to be a mark. Marks belong to what they are around. ``reasoning_tokens``
    counts those of what was thought.
    """

    def __init__(self, parser: ReplyParser | None) -> None:
        self.reasoning_tokens = 0
        self._parser = parser
        self._unsaid: list[int] = []  # how many characters each token brought
        self._last: PartKind = "text" if parser is None else "call"
        self._spoken: list[Spoken] = []
        self._runs: list[Run] = []

    def token(self) -> None:
        """One more has come: what is read next is its text, as far as it is certain."""
        self._unsaid.append(0)

    def read(self, text: str, last: bool = False) -> None:
        """Reads the next piece of the reply; nothing may follow the ``last`` one."""
        if self._unsaid:
            self._unsaid[-1] += len(text)
        if self._parser is None:
            spoken = Spoken("", (text,) if text else ())
        else:
            spoken = self._parser.feed(text, last)
        self._spoken.append(spoken)
        if spoken.reasoning:
            self._say("reasoning", len(self._unsaid))
        for place, part in enumerate(spoken.parts):
            if isinstance(part, str):
                self._say_text(len(part))
            else:
                # Text behind it knows how many tokens are its own.
                text_follows = any(isinstance(each, str) for each in spoken.parts[place:])
                self._say("call", 0 if text_follows else len(self._unsaid))

    def taken(self) -> tuple[Spoken, list[Run]]:
        """What was said since the last time, and by which tokens, in their order."""
        spoken, self._spoken = self._spoken, []
        runs, self._runs = self._runs, []
        if len(spoken) == 1:
            return spoken[0], runs
        together = SpokenSum()
        for each in spoken:
            together.add(each.reasoning, each.parts)
        return together.spoken(), runs

    def _say_text(self, length: int) -> None:
        """Where it follows something else, there are tokens of marks before its own."""
        own = len(self._unsaid)
        if self._last != "text":
            own = covered = 0
            for size in reversed(self._unsaid):
                if covered >= length and size:
                    break
                own, covered = own + 1, covered + size
            self._say(self._last, len(self._unsaid) - own)
        self._say("text", own)

    def _say(self, kind: PartKind, tokens: int) -> None:
        self._last = kind
        if tokens:
            self._runs.append((kind, tokens))
            del self._unsaid[:tokens]
        if kind == "reasoning":
            self.reasoning_tokens += tokens
