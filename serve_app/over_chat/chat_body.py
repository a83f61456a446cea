"""The body of a chat completion that a request of another protocol is translated to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatBody:
    """``places`` are those of its messages in the client's own body, by their numbers."""

    fields: dict[str, Any]
    places: dict[int, str]


@dataclass(slots=True)
class ChatMessages:
    """Chat messages as they are read, where each is in the client's own body, by its number, and
    the ids of the calls of tools in them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)

    def add(self, message: dict[str, Any], place: str) -> None:
        """One more, which is at ``place``."""
        self.places[len(self.messages)] = place
        self.messages.append(message)
