"""A streamed answer as its client hears it: events from raw bytes, what they say, and whether the
stream ends as it should."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"[DONE]"
_SHOWN = 200  # characters of somebody else's message


class EventReader:
    """Takes server-sent events apart, wherever the network cuts them. Lines end with ``\\n`` or
    ``\\r\\n``; comments and fields other than ``data`` are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in these bytes."""
        events = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


class StreamedAnswer:
    """What was heard of one streamed completion or conversation, and when.

    ``pieces`` are the times at which visible text came (or a call of a tool): an empty first delta
    that names the role is none, as in AIPerf. ``heard`` is when the last event with a choice came.
    """

    def __init__(self) -> None:
        self.pieces: list[float] = []
        self.heard: float | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._error = ""
        self._events = EventReader()

    def feed(self, data: bytes, now: float) -> None:
        """Bytes of the body that came at ``now``."""
        for event in self._events.feed(data):
            self._take(event, now)

    @property
    def output_tokens(self) -> int:
        """As the server counts them; where it does not tell, one for every piece."""
        return len(self.pieces) if self.completion_tokens is None else self.completion_tokens

    @property
    def fault(self) -> str:
        """Why this is no whole answer; empty if it is one."""
        if self._error:
            return self._error
        if self.heard is None:
            return "stream without a choice"
        if self.finish_reason is None:
            return "stream ended without a finish_reason"
        return "" if self.done else "stream ended without [DONE]"

    def _take(self, event: bytes, now: float) -> None:
        if event == DONE:
            self.done = True
            return
        try:
            fields = orjson.loads(event)
        except orjson.JSONDecodeError:
            self._fail(f"event is no JSON: {event[:_SHOWN].decode(errors='replace')}")
            return
        if not isinstance(fields, dict):
            self._fail("event is no object")
        elif self.done:
            self._fail("event after [DONE]")
        elif "error" in fields:
            self._fail(f"error event: {told(fields)}")
        else:
            self._read(fields, now)

    def _read(self, fields: dict[str, Any], now: float) -> None:
        if usage := fields.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.completion_tokens = usage.get("completion_tokens")
        for choice in fields.get("choices") or ():
            self.heard = now
            said = choice.get("delta") or choice
            if any(said.get(key) for key in ("text", "content", "reasoning_content", "tool_calls")):
                self.pieces.append(now)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _fail(self, reason: str) -> None:
        self._error = self._error or reason


def refusal(status: int, body: bytes) -> str:
    """The reason of an answer that is no stream, in a line: its status and what it says."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return f"status {status}: {body[:_SHOWN].decode(errors='replace')}".strip(" :\n")
    return f"status {status}: {told(fields)}"


def told(fields: Any) -> str:
    """The message of an error of OpenAI's shape, or of whatever shape it has."""
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_SHOWN]
