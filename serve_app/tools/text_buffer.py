"""Text that comes in pieces, read as if all of it were there: what reads it waits, by yielding,
where the next characters decide and have not come."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

import orjson

Result = TypeVar("Result")
# Yields where it needs more text, returns what it read.
Reading = Generator[None, None, Result]
Tell = Callable[[str], None]
Trim = Callable[[str], str]
# What JSON has outside of strings and brackets: not checked further, for it is passed on as it is.
_PLAIN = re.compile(r"[\s0-9A-Za-z+\-.,:]*")
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_IN_STRING = re.compile(r'[^"\\]*')
_CLOSING = {"{": "}", "[": "]"}


class MalformedCallError(Exception):
    """The text is no call of a tool, or no longer."""


def held_back(text: str, mark: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``mark``."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class TextBuffer:
    """``text`` from ``position`` on is not read yet; ``ended``: nothing will follow it. While it is
    ``pinned`` at a place, all from there on is kept, so that it can be read again. Marks that are
    ``tokens`` stand only where ``noted``, by characters of all text: spelled, they are text."""

    def __init__(self, tokens: Collection[str] = ()) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.pinned: int | None = None
        self._tokens = tokens
        self.noted: list[tuple[int, str]] = []
        self._gone = 0  # characters before `text`

    def append(self, piece: str) -> None:
        kept = self.position if self.pinned is None else self.pinned
        self.text = self.text[kept:] + piece
        self.position -= kept
        self.pinned = None if self.pinned is None else 0
        self._gone += kept
        self.noted = [each for each in self.noted if each[0] >= self._gone]

    def find(self, mark: str, begin: int) -> tuple[int, bool]:
        """Where ``mark`` comes next from the place ``begin`` on, and true; else false, and up to
        where the text is certain to hold none of it."""
        if mark in self._tokens:
            places = (at - self._gone for at, noted in self.noted if noted == mark)
            at = next((each for each in places if each >= begin), len(self.text))
            return min(at, len(self.text)), self.text.startswith(mark, at)
        at = self.text.find(mark, begin)
        if at >= 0:
            return at, True
        return len(self.text) - held_back(self.text[begin:], mark), False

    @property
    def rest(self) -> str:
        return self.text[self.position :]

    def wait(self) -> Reading[None]:
        """Raises:
        MalformedCallError: there is nothing to wait for.
        """
        if self.ended:
            raise MalformedCallError
        yield

    def peek(self) -> Reading[str]:
        """The next character, empty at the end."""
        while self.position == len(self.text) and not self.ended:
            yield
        return self.text[self.position : self.position + 1]

    def skip(self, characters: str | None = None) -> Reading[None]:
        """Skips such characters, white space where they are None."""
        while True:
            rest = self.rest.lstrip(characters)
            self.position = len(self.text) - len(rest)
            if rest or self.ended:
                return
            yield

    def take(self, mark: str, after_space: bool = False) -> Reading[bool]:
        """Reads ``mark`` where it comes next, and white space before it on request."""
        space = 0  # characters from the position on
        while True:
            rest = self.text[self.position + space :]
            rest = rest.lstrip() if after_space else rest
            at = len(self.text) - len(rest)
            space = at - self.position
            here = mark not in self._tokens or (self._gone + at, mark) in self.noted
            if here and rest.startswith(mark):
                self.position = at + len(mark)
                return True
            if self.ended or not mark.startswith(rest) or (rest and not here):
                return False
            yield

    def skip_beginning_of(self, mark: str) -> None:
        """At the end of all text, skips what the end has cut of ``mark`` and of the space before
        it. A mark that is a token is never cut."""
        if self.ended and mark not in self._tokens and mark.startswith(self.rest.lstrip()):
            self.position = len(self.text)

    def expect(self, mark: str) -> Reading[None]:
        if not (yield from self.take(mark)):
            raise MalformedCallError

    def matched(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All that ``pattern``, which matches any part of what it matches, matches here."""
        done = 0  # characters from the position on
        while True:
            match = pattern.match(self.text, self.position + done)
            assert match is not None  # it may be empty
            done = match.end() - self.position
            if match.end() < len(self.text) or self.ended:
                written = self.rest[:done]
                self.position = match.end()
                return written
            yield

    def until(self, mark: str, tell: Tell, trim: Trim = str) -> Reading[bool]:
        """Tells what stands before ``mark`` as it comes, without the end that ``trim`` takes off,
        and reads the mark; all there is, and false, where the mark does not come."""
        at = yield from self.before(mark, tell, trim)
        if at is None:
            tell(self.rest)
            self.position = len(self.text)
            return False
        tell(trim(self.text[self.position : at]))
        self.position = at + len(mark)
        return True

    def before(self, mark: str, tell: Tell, trim: Trim) -> Reading[int | None]:
        """Tells as `until` what is certain to stand before ``mark``, and returns where that is or,
        at the end of all text, None: what is left before it is not told."""
        held = 0  # characters from the position on that are looked through: an end to take off
        while True:
            at, whole = self.find(mark, self.position + held)
            if whole or self.ended:
                return at if whole else None
            # The last of them tells `trim` what goes before: they are not looked at again.
            begin = self.position + max(held - 1, 0)
            certain = trim(self.text[begin:at])
            if certain:
                tell(self.text[self.position : begin] + certain)
                self.position = begin + len(certain)
            held = at - self.position
            yield

    def json_string(self) -> Reading[str]:
        """A string of JSON, as what it says."""
        if (yield from self.peek()) != '"':
            raise MalformedCallError
        content = yield from self.json_value()
        try:
            return str(orjson.loads(content))
        except orjson.JSONDecodeError as error:
            raise MalformedCallError from error

    def json_value(self, tell: Tell | None = None) -> Reading[str]:
        """A value of JSON as it is written. With ``tell`` it is told as it comes, up to where it
        is none, and an empty text returned."""
        if (yield from self.peek()) not in ('"', "{", "["):
            return (yield from self.matched(_SCALAR))
        nesting: list[str] = []  # the brackets that will close
        quoted = False
        done = 0  # characters from the position on
        while True:
            pattern = _IN_STRING if quoted else _PLAIN
            match = pattern.match(self.text, self.position + done)
            assert match is not None  # it may be empty
            done = match.end() - self.position
            character = self.text[match.end() : match.end() + 1]
            escaped = quoted and character == "\\"
            if not character or (escaped and match.end() + 1 == len(self.text)):
                if self.ended:
                    done = len(self.rest)
                if tell is not None:
                    done = self._told(done, tell)
                yield from self.wait()
                continue
            if character == '"':
                quoted = not quoted
            elif not quoted and character in _CLOSING:
                nesting.append(_CLOSING[character])
            elif not quoted and (not nesting or character != nesting.pop()):
                if tell is not None:
                    self._told(done, tell)
                raise MalformedCallError
            done += 2 if escaped else 1
            if not nesting and not quoted:
                break
        if tell is not None:
            self._told(done, tell)
            return ""
        written = self.rest[:done]
        self.position += done
        return written

    def _told(self, length: int, tell: Tell) -> int:
        """Tells so many characters; none of what is left is done."""
        tell(self.rest[:length])
        self.position += length
        return 0
