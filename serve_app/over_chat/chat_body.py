"""The body of a chat completion that a request of another protocol is translated to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

EFFORT = "reasoning_effort"
# Variables of chat templates by which they let models think, or not.
SWITCHES = ("enable_thinking", "thinking")
NO_THINKING = "none"
Reads = Callable[[str], bool]


def given(model: BaseModel, names: Iterable[str]) -> dict[str, Any]:
    """Those of the fields of these ``names`` that a client has given."""
    values = {name: getattr(model, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


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


def thinking_fields(reads: Reads, effort: str | None, on: bool | None) -> dict[str, Any]:
    """Fields of a chat completion that say whether thinking is ``on`` and with which ``effort``,
    None for as the model does. Both are wishes: what its template does not read is left out.
    ``reads`` tells whether it reads a variable."""
    told: dict[str, Any] = {}
    switch = next(filter(reads, SWITCHES), None)
    if on is not None and switch is not None:
        told["chat_template_kwargs"] = {switch: on}
    if on is False:
        effort = NO_THINKING if switch is None else None
    if effort is not None and reads(EFFORT):
        told[EFFORT] = effort
    return told
