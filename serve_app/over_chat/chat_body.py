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
    """``places`` are those of its messages in the client's own body, by their numbers, ``tools``
    those of its tools."""

    fields: dict[str, Any]
    places: dict[int, str]
    tools: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class ChatMessages:
    """Chat messages as they are read, where each is in the client's own body, by its number, and
    the ids of the calls of tools in them. Those of the user that follow each other are one, and so
    are the instructions before all others: many chat templates want turns to alternate."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)

    def add(self, message: dict[str, Any], place: str) -> None:
        """One more, which is at ``place``."""
        last: dict[str, Any] = self.messages[-1] if self.messages else {"role": ""}
        roles = {last["role"], message["role"]}
        leads = len(self.messages) == 1 and roles <= {"system", "developer"}
        if roles == {"user"} or leads:
            add_content(last, message["content"])
            last["role"] = "system" if leads else "user"
            return
        self.places[len(self.messages)] = place
        self.messages.append(message)


def add_content(message: dict[str, Any], content: str | list[dict[str, str]]) -> None:
    """What ``message`` says besides what it says already."""
    said = message["content"]
    message["content"] = content if said is None else text_parts(said)
    if said is not None:
        message["content"] += text_parts(content)


def text_parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
