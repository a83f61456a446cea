"""What each script of this folder is to ask of a server, and how it tells what came of it.

Run in an environment of one library's own: ``python ask_LIBRARY.py URL KEY MODEL``. Imports nothing
of ours, and of others only what every one of the libraries brings with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

CHAT = "I want to book a table for two tonight."
MOST = 200  # tokens of any reply: a small model puts much white space into JSON


class Booking(BaseModel):
    """A table that is booked.

    Whatever a small model says of it ends: Anthropic's library, for one, tells a server of no
    bounds of numbers and texts, and some tell it only on demand that there are no other properties.
    """

    model_config = ConfigDict(extra="forbid")

    room: Literal["inside", "terrace"]
    guests: Literal[1, 2, 3, 4]
    late: bool


Day = Literal["today", "tomorrow"]


def free_tables(day: Day) -> str:
    """How many tables are free on a day."""
    return f"four tables are free {day}"


class FreeTables(BaseModel):
    """How many tables are free on a day."""

    model_config = ConfigDict(extra="forbid")

    day: Day


PARAMETERS = FreeTables.model_json_schema()


@dataclass
class Told:
    """What a library said of one protocol's replies. ``called`` are arguments that the model wrote,
    as the tool got them; ``answer`` is the text after their results."""

    plain: str
    pieces: list[str]
    booking: Booking
    answer: str = ""
    called: list[str] = field(default_factory=list)

    def results(self, calls: Any) -> list[dict[str, str]]:
        """The messages, in OpenAI's form, that tell what came of a chat's ``calls``."""
        days = [json.loads(call.function.arguments)["day"] for call in calls]
        self.called += days
        return [
            {"role": "tool", "tool_call_id": call.id, "content": free_tables(day)}
            for call, day in zip(calls, days, strict=True)
        ]


def report(*protocols: Callable[[str, str, str], Told]) -> None:
    """Prints what each of ``protocols`` told, by its function's name."""
    url, key, model = sys.argv[1:]
    told = {}
    for protocol in protocols:
        fields = asdict(protocol(url, key, model))
        told[protocol.__name__] = fields | {"booking": fields["booking"].model_dump()}
    print(json.dumps(told))
