"""Text from tokens, one token at a time.

Text is released only when it is certain: never inside a UTF-8 character, and never while it may
turn out to be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence


class StopMatcher:
    """Finds one string in a stream of characters (Knuth, Morris and Pratt 1977).

    ``matched`` is the length of the longest beginning of the string that the stream ends in: so
    many characters may still turn out to belong to it.
    """

    __slots__ = ("_failure", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._failure = [0] * len(string)
        length = 0
        for i in range(1, len(string)):
            while length and string[i] != string[length]:
                length = self._failure[length - 1]
            length += string[i] == string[length]
            self._failure[i] = length

    def push(self, character: str) -> bool:
        """Takes one character; true when the whole string has just been completed."""
        matched, string = self.matched, self.string
        while matched and string[matched] != character:
            matched = self._failure[matched - 1]
        self.matched = matched + (string[matched] == character)
        return self.matched == len(string)


class Detokenizer:
    """The text of one sequence.

    Stop strings are looked for in the text of the tokens after the first ``min_tokens``. Of two
    stop strings that end at the same character the longer one counts.
    """

    __slots__ = (
        "_amid_character",
        "_decoder",
        "_hold",
        "_include_stop",
        "_matchers",
        "_min_tokens",
        "_pending",
        "_token_bytes",
        "_tokens",
        "decoded_length",
        "stop_string",
    )

    def __init__(
        self,
        token_bytes: Mapping[int, bytes],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._amid_character = False
        self._matchers = [StopMatcher(string) for string in stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._pending = ""
        self._hold = 0
        self.decoded_length = 0  # complete characters so far, released or not
        self.stop_string: str | None = None

    def push(self, token_id: int) -> bool:
        """Takes one token; true when a stop string is now complete (push nothing after that)."""
        self._tokens += 1
        content = self._token_bytes[token_id]
        if not self._amid_character:
            try:
                return self._append(content.decode())
            except UnicodeDecodeError:
                pass
        piece = self._decoder.decode(content)
        self._amid_character = bool(self._decoder.getstate()[0])
        return self._append(piece)

    def take(self) -> str:
        """The text that has become certain since the last call."""
        if not self._hold:
            text, self._pending = self._pending, ""
            return text
        cut = len(self._pending) - self._hold
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def finish(self) -> str:
        """The rest of the text; an unfinished character becomes U+FFFD, as decoding makes it."""
        if self.stop_string is None:
            self._pending += self._decoder.decode(b"", final=True)
        self._hold = 0
        return self.take()

    def _append(self, piece: str) -> bool:
        self.decoded_length += len(piece)
        start = len(self._pending)
        self._pending += piece
        if not self._matchers or self._tokens <= self._min_tokens:
            return False
        for offset, character in enumerate(piece):
            complete = [matcher for matcher in self._matchers if matcher.push(character)]
            if complete:
                end = start + offset + 1
                self.stop_string = max((matcher.string for matcher in complete), key=len)
                if not self._include_stop:
                    end -= len(self.stop_string)
                self._pending = self._pending[:end]
                self._hold = 0
                return True
        self._hold = max(matcher.matched for matcher in self._matchers)
        return False
