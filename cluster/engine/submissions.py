"""Commands on their way: what several requests share travels once, and is shared on arrival.

The choices of one HTTP request have one prompt and the same lists of tokens. 128 copies of 16,000
ids took an engine longer to decode than a hundred steps, and to keep more than its KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import asdict

from lexshard.actors.messages import Commands, Drafts, Request, SamplingParameters

# Of a `Request`, and of its parameters those that may be long.
SHARED = ("prompt_ids", "parameters")
LISTS = ("logit_bias", "bad_words", "allowed_ids", "grammar", "stop_token_ids")
_NO_LISTS = {name: getattr(SamplingParameters(), name) for name in LISTS}


def _message(name: str, **kinds: Any) -> Any:
    """A type of messages, whose fields travel without their names."""
    return msgspec.defstruct(name, list(kinds.items()), array_like=True)


_KINDS = get_type_hints(Request)
_OWN = tuple(name for name in _KINDS if name not in SHARED)
_Lists = _message("_Lists", **{n: get_type_hints(SamplingParameters)[n] for n in LISTS})
# A `Request` that says of its prompt and parameters where they stand in the message.
_Submission = _message("_Submission", **{**_KINDS, **dict.fromkeys(SHARED, int)})
_Message = _message(
    "_Message",
    cancel=tuple[str, ...],
    stop=bool,
    drafts=tuple[Drafts, ...],
    submit=list[_Submission],  # type: ignore[valid-type]
    prompts=list[tuple[int, ...]],
    parameters=list[tuple[SamplingParameters, int]],  # and where their lists stand
    lists=list[_Lists],  # type: ignore[valid-type]
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Message)


def encode(commands: Commands) -> bytes:
    """Commands as bytes. Shared is what is one object."""
    message = _Message(commands.cancel, commands.stop, commands.drafts, [], [], [], [])
    places: dict[tuple[int, ...], int] = {}

    def place(known: list[Any], make: Callable[[], Any], *parts: object) -> int:
        """Where what ``parts`` make up stands among those ``known``; it is made once."""
        name = (id(known), *map(id, parts))
        if name not in places:
            places[name] = len(known)
            known.append(make())
        return places[name]

    def without_lists(own: SamplingParameters) -> tuple[SamplingParameters, int]:
        values = [getattr(own, name) for name in LISTS]
        lists = place(message.lists, lambda: _Lists(*values), *values)
        return replace(own, **_NO_LISTS), lists

    for request in commands.submit:
        own, prompt = request.parameters, request.prompt_ids
        submission = _Submission(
            **{name: getattr(request, name) for name in _OWN},
            prompt_ids=place(message.prompts, partial(tuple, prompt), prompt),
            parameters=place(message.parameters, partial(without_lists, own), own),
        )
        message.submit.append(submission)
    return _encoder.encode(message)


def decode(content: bytes) -> Commands:
    """What `encode` was given. Raises `msgspec.DecodeError` for what it has not made."""
    message = _decoder.decode(content)
    parameters = [
        replace(each, **{name: getattr(message.lists[lists], name) for name in LISTS})
        for each, lists in message.parameters
    ]
    submit = []
    for own in message.submit:
        values = asdict(own)
        values["prompt_ids"] = message.prompts[own.prompt_ids]
        values["parameters"] = parameters[own.parameters]
        submit.append(Request(**values))
    return Commands(tuple(submit), message.cancel, message.stop, message.drafts)
