"""What crosses a session of ``/v1/edge`` beside frames of guesses and verdicts (docs/edge.md), as
msgpack: an `Opening` or `Resuming` first; back `Opened`, `Told`, `Refused`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.edge.frames import MOST_RESOLUTION, VERSION, EdgeMode
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.body_room import MAX_JSON_VALUES
from lexshard.serve_app.openai.protocol import MAX_LIST_ENTRIES

PATH = "/v1/edge"
MOST_FRAME_BYTES = 64 * 1024  # 255 distributions over 262,144 tokens have less
# An opening of a million ids of 18 bits that allows all of 262,144 tokens has 3.4 million.
MOST_MESSAGE_BYTES = 4 * 1024 * 1024
BROKEN = 4500  # why a session is closed, beside 1000: 4000 and the status that HTTP has for it

# Of a completion's fields, those that a session may have: bounded before anything is made of them.
Ids = Annotated[list[int], Meta(max_length=MAX_JSON_VALUES)]
Entries = Annotated[dict[str, float | str], Meta(max_length=MAX_LIST_ENTRIES)]
Parameters = Annotated[
    dict[str, bool | int | float | str | Ids | Entries | None], Meta(max_length=64)
]


class Cloud(msgspec.Struct, frozen=True):
    """What a server says of itself to devices, as JSON. ``vocabulary`` is its tokens' hash."""

    models: tuple[str, ...]
    vocabulary: str
    chat_template: str | None
    engine: EngineInformation
    version: int = VERSION


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Asks for a text. ``vocabulary`` is the hash of the device's tokens; ``prompt`` and ``said``,
    what it has of the output already, are packed (`pack_ids`); ``parameters`` are fields of
    ``POST /v1/completions``."""

    version: int
    mode: EdgeMode
    vocabulary: str
    prompt: bytes
    parameters: Parameters
    # A server takes 1,024 words, each of which may be several sequences of tokens.
    bad_words: Annotated[tuple[tuple[int, ...], ...], Meta(max_length=4 * MAX_LIST_ENTRIES)] = ()
    choice: int = 0
    said: bytes = b""
    resolution: Annotated[int, Meta(ge=1, le=MOST_RESOLUTION)] = 100
    size: Annotated[int, Meta(ge=1)] = 32


class Resuming(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """Goes on with a session of which the device has ``length`` tokens, the prompt's with them. As
    behind an opening, frames may follow at once; what was on its way is lost."""

    session: str
    length: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The text begins, or goes on."""

    session: str


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """An event that is more than a verdict, by the fields of a `SequenceEvent` that say something:
    the first and the last of a text, and those of requests that ask for more than tokens."""

    event: dict[str, Any]

    @classmethod
    def of(cls, event: SequenceEvent) -> Told:
        own = [(field, getattr(event, field.name)) for field in fields(event)[2:]]
        return cls({field.name: value for field, value in own if value != field.default})

    def event_of(self, request: Request) -> SequenceEvent:
        """Raises `msgspec.ValidationError`."""
        named = {"request_id": request.request_id, "choice": request.choice}
        return msgspec.convert(self.event | named, SequenceEvent)


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Why nothing comes of it, as HTTP would say; the connection is closed."""

    status: int
    message: str


encode = msgspec.msgpack.Encoder().encode
decode_beginning = Decoder[Opening | Resuming](Opening | Resuming).decode
decode_reply = Decoder[Opened | Told | Refused](Opened | Told | Refused).decode


def is_frame(content: bytes) -> bool:
    """Whether it is a batch or a verdict: they begin with a bit that is 0, as no message does."""
    return bool(content) and content[0] < 128


def pack_ids(token_ids: Sequence[int], token_bits: int) -> bytes:
    """``token_bits`` bits each, most significant first; the last byte is filled up with zeros."""
    places = np.arange(token_bits)[::-1]
    return np.packbits(np.array(token_ids, np.int64)[:, None] >> places & 1).tobytes()


def unpack_ids(content: bytes, token_bits: int) -> tuple[int, ...]:
    bits = np.unpackbits(np.frombuffer(content, np.uint8))
    rows = bits[: len(bits) // token_bits * token_bits].reshape(-1, token_bits)
    return tuple((rows @ (1 << np.arange(token_bits)[::-1])).tolist())
