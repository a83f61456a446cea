"""From the chunks of a chat completion to what a reply consists of: reasoning, text, calls of
tools, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

PartKind = Literal["reasoning", "text", "call"]


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


@dataclass(frozen=True, slots=True)
class Began:
    part: ReplyPart


@dataclass(frozen=True, slots=True)
class Added:
    """``text`` is never empty."""

    part: ReplyPart
    text: str
    logprobs: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EndedPart:
    part: ReplyPart


Step = Began | Added | EndedPart


class ReplyReader:
    """Reads the chunks of one choice. ``finish_reason`` and ``stop_reason``, the stop string that
    ended it, are None until they are told, and so is ``usage``, in a chat completion's words."""

    def __init__(self) -> None:
        self.parts: list[ReplyPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self._call: int | None = None  # the number of the call that is open

    def take(self, chunk: dict[str, Any]) -> Iterator[Step]:
        """What ``chunk`` adds; read it to its end."""
        if chunk.get("usage") is not None:
            self.usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            yield from self._told("reasoning", delta.get("reasoning"), [])
            scores = (choice.get("logprobs") or {}).get("content") or []
            yield from self._told("text", delta.get("content"), scores)
            for call in delta.get("tool_calls") or ():
                yield from self._called(call)
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                stop = choice.get("stop_reason")
                self.stop_reason = stop if isinstance(stop, str) else None

    def end(self) -> Iterator[Step]:
        """Ends what is open, when all chunks were read."""
        if self.parts and not self.parts[-1].ended:
            self.parts[-1].ended = True
            yield EndedPart(self.parts[-1])

    def _told(
        self, kind: PartKind, text: str | None, logprobs: list[dict[str, Any]]
    ) -> Iterator[Step]:
        if not text:
            return
        if not self.parts or self.parts[-1].kind != kind:
            yield from self._begin(ReplyPart(kind, len(self.parts)))
        yield self._add(text, logprobs)

    def _called(self, call: dict[str, Any]) -> Iterator[Step]:
        custom = "custom" in call
        told = call["custom"] if custom else call["function"]
        if call["index"] != self._call or self.parts[-1].kind != "call":
            self._call = call["index"]
            part = ReplyPart("call", len(self.parts), told["name"], call["id"], custom)
            yield from self._begin(part)
        text = told.get("input" if custom else "arguments")
        if text:
            yield self._add(text, [])

    def _begin(self, part: ReplyPart) -> Iterator[Step]:
        yield from self.end()
        self.parts.append(part)
        yield Began(part)

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> Step:
        part = self.parts[-1]
        part.pieces.append(text)
        part.logprobs += logprobs
        return Added(part, text, logprobs)
