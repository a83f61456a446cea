"""What crosses a session of ``/v1/edge`` beside frames of guesses and verdicts (docs/edge.md): an
`Opening` or `Resuming` first, zlib-compressed msgpack; back `Opened`, `Told`, `Refused`, msgpack.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.edge.frames import MARK, MARK_BITS, VERSION, FrameError
from lexshard.actors.edge.settings import EdgeMode
from lexshard.actors.messages import Request, SequenceEvent

PATH = "/v1/edge"
MOST_RESOLUTION = 1_000  # parts of a distribution: 0.1 s to read one, ten times as many 2 s
MOST_FRAME_BYTES = 64 * 1024  # 255 distributions over 262,144 tokens have less
# Why a session is closed, beside 1000: 4000 and the status that HTTP has for it.
TAKEN_OVER, BROKEN = 4409, 4500


class Cloud(msgspec.Struct, frozen=True):
    """What a server says of itself to devices, as JSON. ``vocabulary`` is its tokens' hash; a step
    of its engine has taken ``step_seconds`` on the average, 0 before the first."""

    models: tuple[str, ...]
    vocabulary: str
    chat_template: str | None
    engine: EngineInformation
    step_seconds: float = 0.0
    version: int = VERSION


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Asks for a text. ``vocabulary`` is the hash of the device's tokens; ``prompt`` and ``said``,
    what it has of the output already, are packed (`pack_ids`); ``parameters`` are fields of
    ``POST /v1/completions``."""

    version: int
    mode: EdgeMode
    vocabulary: str
    prompt: bytes
    parameters: dict[str, Any]
    bad_words: tuple[tuple[int, ...], ...] = ()
    choice: int = 0
    said: bytes = b""
    resolution: Annotated[int, Meta(ge=1, le=MOST_RESOLUTION)] = 100
    size: Annotated[int, Meta(ge=1)] = 32


class Resuming(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """Goes on with a session of which the device has ``length`` tokens, the prompt's with them."""

    session: str
    length: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """What follows is told as it happens; all that the device had missed was told before. ``last``
    is the last batch that came, and ``unanswered`` are those that have no answer yet."""

    session: str
    last: int = 0
    unanswered: tuple[int, ...] = ()


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """An event that is more than a verdict, by the fields of a `SequenceEvent` that say something:
    the first and the last of a text, and those of requests that ask for more than tokens."""

    event: dict[str, Any]

    @classmethod
    def of(cls, event: SequenceEvent) -> Told:
        own = [(field, getattr(event, field.name)) for field in fields(event)[2:]]
        return cls({field.name: value for field, value in own if value != field.default})

    def event_of(self, request: Request) -> SequenceEvent:
        """Raises `FrameError`."""
        named = {"request_id": request.request_id, "choice": request.choice}
        try:
            return msgspec.convert(self.event | named, SequenceEvent)
        except msgspec.ValidationError as error:
            raise FrameError(f"the server tells of no event: {error}") from None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Why nothing comes of it, as HTTP would say; the connection is closed."""

    status: int
    message: str


Beginning = Opening | Resuming
Reply = Opened | Told | Refused
encode_reply = msgspec.msgpack.Encoder().encode


def encode_beginning(beginning: Beginning) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(beginning))


def decode_beginning(content: bytes, most_bytes: int) -> Beginning:
    """Raises `FrameError` for anything else, and for what is longer than ``most_bytes``."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(content, most_bytes)
        if unpacking.unconsumed_tail or not unpacking.eof:
            raise FrameError(f"it is cut off, or has more than {most_bytes} bytes")
        return msgspec.msgpack.decode(text, type=Beginning)
    except (zlib.error, msgspec.DecodeError) as error:
        raise FrameError(f"no session begins like this: {error}") from None


def is_batch(content: bytes) -> bool:
    return bool(content) and content[0] >> (8 - MARK_BITS) == MARK


def is_verdict(content: bytes) -> bool:
    return bool(content) and content[0] < 128


def decode_reply(content: bytes) -> Reply:
    """Raises `FrameError`."""
    try:
        return msgspec.msgpack.decode(content, type=Reply)
    except msgspec.DecodeError as error:
        raise FrameError(f"the server says what it cannot say: {error}") from None


def pack_ids(token_ids: Sequence[int], token_bits: int) -> bytes:
    """``token_bits`` bits each, most significant first; the last byte is filled up with zeros."""
    places = np.arange(token_bits)[::-1]
    return np.packbits(np.array(token_ids, np.int64)[:, None] >> places & 1).tobytes()


def unpack_ids(content: bytes, token_bits: int) -> tuple[int, ...]:
    bits = np.unpackbits(np.frombuffer(content, np.uint8))
    rows = bits[: len(bits) // token_bits * token_bits].reshape(-1, token_bits)
    return tuple((rows @ (1 << np.arange(token_bits)[::-1])).tolist())
