"""What crosses a session of ``/v1/edge`` beside frames of guesses and verdicts (docs/edge.md).

The device begins with an `Opening` or a `Resuming`, zlib-compressed msgpack, and goes on with
frames (`actors.edge.frames`). What comes back is a verdict, whose first four bits are the frames'
version, or msgpack: `Opened`, `Resumed`, `Told` or `Refused`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from lexshard.actors.edge.frames import VERSION, VERSION_BITS, EdgeMode, FrameError
from lexshard.actors.messages import (
    Certificate,
    FinishReason,
    SamplingParameters,
    SequenceEvent,
    SequenceTiming,
    TokenLogprobs,
    TokenOrigin,
)

PATH = "/v1/edge"
MOST_FRAME_BYTES = 64 * 1024  # 255 distributions over 262,144 tokens have less
# Why a session is closed, beside 1000: 4000 and the status that HTTP has for it.
UNKNOWN_SESSION, TAKEN_OVER, BROKEN = 4404, 4409, 4500


class Opening(msgspec.Struct, frozen=True, omit_defaults=True, tag="open"):
    """Asks for a text. ``vocabulary`` is the hash of the device's tokens; ``prompt`` and what it
    has of an output already, ``said``, are ids of ``token_bits`` bits each (`pack_ids`).
    ``parameters`` are fields of ``POST /v1/completions``, as JSON."""

    version: int
    mode: EdgeMode
    vocabulary: str
    prompt: bytes
    parameters: bytes
    bad_words: tuple[tuple[int, ...], ...] = ()
    choice: int = 0
    said: bytes = b""
    resolution: int = 100
    size: int = 32


class Resuming(msgspec.Struct, frozen=True, tag="resume"):
    """Goes on with a session of which the device has ``length`` tokens, the prompt's with them."""

    session: str
    length: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    session: str


class Told(msgspec.Struct, frozen=True, omit_defaults=True, tag="told"):
    """An event that is more than a verdict: the first and the last of a text, and those of requests
    that ask for more than tokens. The fields are those of `actors.messages.SequenceEvent`, which as
    a dataclass would name every one of them on the link."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: str | None = None
    refused: bool = False
    certificates: tuple[Certificate, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    timing: SequenceTiming | None = None
    answers: int | None = None


class Resumed(msgspec.Struct, frozen=True, omit_defaults=True, tag="resumed"):
    """What the device has missed: ``events``; the ``last`` batch that came, and those of them that
    are not answered."""

    last: int
    unanswered: tuple[int, ...] = ()
    events: tuple[Told, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why nothing comes of it, as HTTP would say; the session is closed."""

    status: int
    error: dict[str, Any]


Beginning = Opening | Resuming
Reply = Opened | Told | Resumed | Refused
_FIELDS = Told.__struct_fields__
_encoder = msgspec.msgpack.Encoder()
_beginnings = msgspec.msgpack.Decoder(Beginning)
_replies = msgspec.msgpack.Decoder(Reply)


def told(event: SequenceEvent) -> Told:
    return Told(**{name: getattr(event, name) for name in _FIELDS})


def event_of(told: Told, request_id: str, choice: int) -> SequenceEvent:
    return SequenceEvent(request_id, choice, **{name: getattr(told, name) for name in _FIELDS})


def needs_telling(event: SequenceEvent) -> bool:
    """Whether a verdict is not enough for it."""
    plain = not (event.logprobs or event.certificates or event.origins)
    return not plain or event.timing is not None or event.finish_reason is not None


def encode_beginning(beginning: Beginning) -> bytes:
    return zlib.compress(_encoder.encode(beginning))


def decode_beginning(content: bytes, most_bytes: int) -> Beginning:
    """Raises `FrameError` for anything else, and for what is longer than ``most_bytes``."""
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(content, most_bytes)
        if unpacking.unconsumed_tail or not unpacking.eof:
            raise FrameError(f"it is cut off, or has more than {most_bytes} bytes")
        return _beginnings.decode(text)
    except (zlib.error, msgspec.DecodeError) as error:
        raise FrameError(f"no session begins like this: {error}") from None


def encode_reply(reply: Reply) -> bytes:
    return _encoder.encode(reply)


def is_frame(content: bytes) -> bool:
    return bool(content) and content[0] >> (8 - VERSION_BITS) == VERSION


def decode_reply(content: bytes) -> Reply:
    """Raises `FrameError`."""
    try:
        return _replies.decode(content)
    except msgspec.DecodeError as error:
        raise FrameError(f"the server says what it cannot say: {error}") from None


def vocabulary_hash(ids_by_token: Mapping[str, int]) -> str:
    """The same for two tokenizers whose tokens have the same ids."""
    tokens = sorted(ids_by_token.items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(orjson.dumps(tokens)).hexdigest()[:32]


def pack_ids(token_ids: Sequence[int], token_bits: int) -> bytes:
    """``token_bits`` bits each, most significant first; the last byte is filled up with zeros."""
    words = np.array(token_ids, ">u4").reshape(-1, 1).view(np.uint8)
    return np.packbits(np.unpackbits(words, axis=1)[:, 32 - token_bits :]).tobytes()


def unpack_ids(content: bytes, token_bits: int) -> list[int]:
    bits = np.unpackbits(np.frombuffer(content, np.uint8))
    rows = bits[: len(bits) // token_bits * token_bits].reshape(-1, token_bits)
    whole = np.zeros((len(rows), 32), np.uint8)
    whole[:, 32 - token_bits :] = rows
    ids: list[int] = np.packbits(whole, axis=1).reshape(-1).view(">u4").tolist()
    return ids


def completion_fields(parameters: SamplingParameters, priority: int = 0) -> bytes:
    """The fields of ``POST /v1/completions`` that ask for ``parameters``, as JSON, but for bad
    words, which are ids already."""
    own = parameters
    fields: dict[str, Any] = {
        "temperature": own.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p,
        "min_p": own.min_p,
        "repetition_penalty": own.repetition_penalty,
        "presence_penalty": own.presence_penalty,
        "frequency_penalty": own.frequency_penalty,
        "min_tokens": own.min_tokens,
        "max_tokens": own.max_tokens,
        "ignore_eos": own.ignore_eos,
        "priority": priority,
        # Seeds are any 64 bits here, an int64 in a request.
        "seed": own.seed - 2**64 if own.seed >= 2**63 else own.seed,
    }
    optional = {
        "logit_bias": {str(token): bias for token, bias in own.logit_bias},
        "stop_token_ids": list(own.stop_token_ids),
        "certificate": own.certificate,
        "draft": own.draft,
        "structured_outputs": own.grammar and {"grammar": own.grammar},  # which a server refuses
    }
    fields.update((name, value) for name, value in optional.items() if value)
    present = {
        "allowed_token_ids": None if own.allowed_ids is None else list(own.allowed_ids),
        "logprobs": own.logprobs,
        "prompt_logprobs": own.prompt_logprobs,
    }
    fields.update((name, value) for name, value in present.items() if value is not None)
    return orjson.dumps(fields)
