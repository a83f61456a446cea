"""Commands on their way: what several requests share travels once, and is shared on arrival.

The choices of one HTTP request have one prompt and the same lists of tokens. 128 copies of 16,000
ids took an engine longer to decode than a hundred steps, and to keep more than its KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import msgspec

from lexshard.actors.messages import Commands, Drafting, Drafts, Request, SamplingParameters


@dataclass(frozen=True, slots=True)
class _Lists:
    """The fields of `SamplingParameters` that may be long."""

    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]
    allowed_ids: tuple[int, ...] | None
    grammar: str | None
    stop_token_ids: tuple[int, ...]


_NAMES = tuple(each.name for each in fields(_Lists))
_NO_LISTS = {name: getattr(SamplingParameters(), name) for name in _NAMES}


class _Submission(NamedTuple):
    """The fields of a `Request`, of its prompt and parameters the places."""

    request_id: str
    choice: int
    prompt: int
    parameters: int
    priority: int
    resumed_ids: tuple[int, ...]
    client: str
    cache_salt: str
    drafting: Drafting


@dataclass(slots=True)
class _Message:
    """`Commands` with what requests share beside them. A parameters' lists are named by place."""

    cancel: tuple[str, ...]
    stop: bool
    drafts: tuple[Drafts, ...]
    submit: list[_Submission] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    parameters: list[tuple[SamplingParameters, int]] = field(default_factory=list)
    lists: list[_Lists] = field(default_factory=list)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)


def encode(commands: Commands) -> bytes:
    """Commands as bytes. Shared is what is one object."""
    message = _Message(commands.cancel, commands.stop, commands.drafts)
    places: dict[tuple[int, ...], int] = {}

    def place(known: list[Any], value: Any, *parts: object) -> int:
        """Where ``value``, which ``parts`` make up, stands among those ``known``."""
        name = (id(known), *map(id, parts))
        if name not in places:
            places[name] = len(known)
            known.append(value)
        return places[name]

    for request in commands.submit:
        own = request.parameters
        values = [getattr(own, name) for name in _NAMES]
        lists = place(message.lists, _Lists(*values), *values)
        parameters = place(message.parameters, (replace(own, **_NO_LISTS), lists), own)
        prompt = place(message.prompts, request.prompt_ids, request.prompt_ids)
        message.submit.append(
            _Submission(
                request.request_id,
                request.choice,
                prompt,
                parameters,
                request.priority,
                request.resumed_ids,
                request.client,
                request.cache_salt,
                request.drafting,
            )
        )
    return _encoder.encode(message)


def decode(content: bytes) -> Commands:
    """What `encode` was given. Raises `msgspec.DecodeError` for what it has not made."""
    message = _decoder.decode(content)
    parameters = [
        replace(each, **{name: getattr(message.lists[lists], name) for name in _NAMES})
        for each, lists in message.parameters
    ]
    submit = tuple(
        Request(
            own.request_id,
            own.choice,
            message.prompts[own.prompt],
            parameters[own.parameters],
            own.priority,
            own.resumed_ids,
            own.client,
            own.cache_salt,
            own.drafting,
        )
        for own in message.submit
    )
    return Commands(submit, message.cancel, message.stop, message.drafts)
