"""What clients sent, piece by piece, with every mistake told by the place it is at in their own
body: ``input[2].call_id``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from lexshard.serve_app.known_fields import UNKNOWN_FIELD
from lexshard.serve_app.openai.errors import (
    ApiError,
    bad_request,
    not_implemented,
    shortened,
    unknown_parameter,
)
from lexshard.serve_app.openai.protocol import NOT_IMPLEMENTED, WRONG_TYPE, Model
from lexshard.serve_app.over_chat.chat_body import ChatBody


def read_at(model: type[Model], value: Any, place: str = "") -> Model:
    """A piece of a body as what it is; ``place`` is where, empty for the body itself. The ``model``
    has no field that may be of several types, but null: their names would be part of places.

    Raises:
        ApiError: 400 naming the place of the first mistake.
    """
    if not isinstance(value, dict):
        if place:
            raise Piece(value, place).wrong(" must be an object", "invalid_type")
        raise bad_request("the body must be a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = place
        for part in problem["loc"]:
            where = inside(where, part)
        if problem["type"] == UNKNOWN_FIELD:
            name = shortened(inside(where, problem["msg"]))
            raise unknown_parameter(name, problem["ctx"]["near"]) from error
        if problem["type"] == NOT_IMPLEMENTED:
            raise not_implemented(where) from error
        code = "missing_required_parameter" if problem["type"] == "missing" else None
        if problem["type"].endswith(WRONG_TYPE):
            code = "invalid_type"
        raise bad_request(f"'{where}': {problem['msg']}", where, code) from error


def check_depth(body: Any) -> None:
    """What is made of a body, and repeats parts of it, is a little deeper than it.

    Raises:
        ApiError: 400 where that could not be written.
    """
    try:
        orjson.dumps([[[[body]]]])
    except orjson.JSONEncodeError as error:
        raise bad_request("the body is nested too deeply") from error


def inside(place: str, part: int | str) -> str:
    """The place of a part, an entry or a field, of what is at ``place``."""
    if isinstance(part, int):
        return f"{place}[{part}]"
    return f"{place}.{part}" if place else part


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a body, and where in it. Every method raises `ApiError`, 400, that names the place
    of what is wrong."""

    value: Any
    place: str

    def read(self, model: type[Model]) -> Model:
        """As what it is; see `read_at`."""
        return read_at(model, self.value, self.place)

    def part(self, name: str) -> Piece:
        """What an object has under this name; nothing is None."""
        return Piece(self.value.get(name), inside(self.place, name))

    def entries(self, what: str = "entries") -> Iterator[Piece]:
        """Those of a list, of such things."""
        if not isinstance(self.value, list):
            raise self.wrong(f" must be a string or a list of {what}", "invalid_type")
        return (Piece(each, inside(self.place, i)) for i, each in enumerate(self.value))

    def kind(self, known: Container[str], reason: str, usual: str | None = None) -> str:
        """The ``type`` of an object, ``usual`` where it has none. ``reason`` is why there are no
        others than those ``known``."""
        if not isinstance(self.value, dict):
            raise self.wrong(" must be an object", "invalid_type")
        told = self.part("type")
        kind = usual if told.value is None else told.value
        if kind is None:
            raise told.wrong(" is required", "missing_required_parameter")
        if not isinstance(kind, str):
            raise told.wrong(" must be a string", "invalid_type")
        if kind not in known:
            raise told.wrong(f" is '{shortened(kind)}': {reason}", "unsupported_parameter")
        return kind

    def wrong(self, told: str, code: str | None = None) -> ApiError:
        """A sentence that begins with the place, in quotes, after which ``told`` goes on."""
        return bad_request(f"'{self.place}'{told}", self.place, code)


_MESSAGE = re.compile(r"\bmessages(?:\.|\[)(\d+)\]?")
_TOOL = re.compile(r"\btools\.(\d+)\.(?:function|custom)")


def in_own_terms(error: ApiError, names: Mapping[str, str], body: ChatBody) -> ApiError:
    """What is wrong with a chat ``body``, told of the body that it was made of. ``names`` of fields
    by those of a chat body, of fields of tools with a dot before them."""

    def message_place(match: re.Match[str]) -> str:
        return body.places.get(int(match[1]), match[0])

    def tool_place(match: re.Match[str]) -> str:
        return body.tools.get(int(match[1]), f"tools[{match[1]}]")

    def renamed(text: str) -> str:
        text = _TOOL.sub(tool_place, _MESSAGE.sub(message_place, text))
        for chat_name, own in names.items():
            before = r"(?<=\])" if chat_name.startswith(".") else r"(?<![\w.\]])"
            text = re.sub(rf"{before}{re.escape(chat_name)}(?![\w(])", own, text)
        return text

    parameter = error.parameter
    if parameter is None or error.status != 400:
        return error
    # Only names in quotes are names in a message, but for that of the prompt's field.
    message = re.sub(r"(?<!\w)'([^']*)'", lambda match: f"'{renamed(match[1])}'", error.message)
    if "messages" in names:
        message = re.sub(r"\b(in|of) the messages\b", rf"\1 the {names['messages']}", message)
        message = message.replace("your messages ", f"your {names['messages']} ")
    return ApiError(400, message, renamed(parameter), error.headers, error.code)
