"""Reads what models write where a tool is called, whichever way their family writes it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import orjson
from pydantic_core import from_json

from lexshard.serve_app.openai.errors import shortened
from lexshard.serve_app.structured.schemas import from_root, resolved
from lexshard.serve_app.tools.families import ToolFamily
from lexshard.serve_app.tools.offer import INPUT, OfferedTool
from lexshard.serve_app.tools.text_buffer import MalformedCallError, Reading, TextBuffer

# Around the input of a custom tool of a Lark grammar, which stands in place of the arguments.
INPUT_OPENING, INPUT_CLOSING = "<input>", "</input>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_UNTIL_BRACKET = re.compile(r"[^>\n]*")
# Models write either, whatever they were shown.
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("id", "type"))
# What schemas say of all arguments together.
_OF_ALL = (
    *("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "$dynamicRef", "$recursiveRef"),
    *("minProperties", "maxProperties", "propertyNames", "patternProperties", "dependencies"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties"),
)
_NAMING = {*_OF_ALL, "properties", "required", "additionalProperties"}


class CallPiece(msgspec.Struct, frozen=True):
    """What becomes known of one call at a time: ``text`` is the next piece of its arguments, of a
    custom tool of its input. The first piece has ``call_id`` and ``name``."""

    index: int
    text: str
    call_id: str | None = None
    name: str | None = None
    custom: bool = False


class CallReader:
    """Reads calls of ``tools`` from ``buffer`` and tells ``tell`` what it finds. ``told`` counts
    the calls that began; the last of them is ``whole`` when all of it was read.

    A call is told as soon as it is certain that it is one; only then the buffer's pin is released,
    and what was told stays told.
    """

    def __init__(
        self,
        buffer: TextBuffer,
        family: ToolFamily,
        tools: Mapping[str, OfferedTool],
        tell: Callable[[CallPiece], None],
    ) -> None:
        self.told = 0
        self.whole = True
        self._tell = tell
        self._buffer = buffer
        self._family = family
        self._tools = tools
        self._argument_keys = {family.arguments_key, *_ARGUMENT_KEYS}
        self._first_keys = {family.name_key, *self._argument_keys, *_OTHER_KEYS}
        # Of a custom tool's call that is read, where they are JSON.
        self._custom_arguments: list[str] | None = None
        self._custom = False

    def calls(self) -> Reading[None]:
        """Reads what follows an opening mark, or the beginning of a reply, to the closing mark.

        Raises:
            MalformedCallError: it is no call, or stopped being one.
        """
        buffer, family = self._buffer, self._family
        yield from buffer.skip()
        next_character = yield from buffer.peek()
        if next_character == "[":
            yield from self._list()
        elif next_character == "{":
            yield from self._object()
            while family.bare and (yield from buffer.take(";", after_space=True)):
                yield from self._next_object()
        elif family.body == "named":
            yield from self._named()
        elif family.body == "xml":
            yield from self._xml()
        else:
            raise MalformedCallError
        if family.closing and not (yield from buffer.take(family.closing, after_space=True)):
            buffer.skip_beginning_of(family.closing)

    def give_up(self) -> None:
        """The call that was read last, if any, goes no further."""
        if self._custom_arguments is not None:
            written = "".join(self._custom_arguments)
            self._custom_arguments = None
            self._add(_input_of(written))

    def _end(self) -> None:
        self.give_up()
        self.whole = True

    def _begin(self, tool: OfferedTool, as_written: bool = False) -> None:
        """``as_written``: the input of a custom tool comes as it is, not as JSON."""
        length = self._family.call_id_length
        call_id = uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"
        self._tell(CallPiece(self.told, "", call_id, tool.name, tool.custom))
        self.told += 1
        self.whole = False
        self._custom_arguments = [] if tool.custom and not as_written else None
        self._custom = tool.custom
        self._buffer.pinned = None

    def _argument(self, text: str) -> None:
        if self._custom_arguments is not None:
            self._custom_arguments.append(text)
        else:
            self._add(text)

    def _add(self, text: str) -> None:
        if text:
            self._tell(CallPiece(self.told - 1, text, custom=self._custom))

    def _tool(self, name: str) -> OfferedTool:
        if name not in self._tools:
            raise MalformedCallError
        return self._tools[name]

    def _list(self) -> Reading[None]:
        buffer = self._buffer
        yield from buffer.expect("[")
        yield from buffer.skip()
        yield from self._object()
        while (yield from buffer.take(",", after_space=True)):
            yield from self._next_object()
        yield from buffer.skip()
        yield from buffer.expect("]")

    def _next_object(self) -> Reading[None]:
        """One that follows another; where it is no call, all of it is text."""
        yield from self._buffer.skip()
        self._buffer.pinned = self._buffer.position
        yield from self._object()

    def _object(self) -> Reading[None]:
        """``{"name": "f", "arguments": {...}}``, in any order, with anything else in it after."""
        buffer = self._buffer
        yield from buffer.expect("{")
        tool: OfferedTool | None = None
        early: str | None = None  # arguments before the name
        begun = False
        while True:
            yield from buffer.skip()
            key = yield from buffer.json_string()
            if tool is None and key not in self._first_keys:
                raise MalformedCallError  # some other object
            yield from buffer.skip()
            yield from buffer.expect(":")
            yield from buffer.skip()
            if key == self._family.name_key and tool is None:
                tool = self._tool((yield from buffer.json_string()))
                if early is not None:
                    self._begin(tool)
                    self._argument(early)
                    begun = True
            elif key not in self._argument_keys or begun or early is not None:
                yield from buffer.json_value()
            elif tool is None:
                yield from self._expect_object()
                early = yield from buffer.json_value()
            else:
                yield from self._arguments(tool)
                begun = True
            if not (yield from buffer.take(",", after_space=True)):
                break
        yield from buffer.skip()
        yield from buffer.expect("}")
        if tool is None:
            raise MalformedCallError
        if not begun:
            self._begin(tool)
            self._argument("{}")
        self._end()

    def _expect_object(self) -> Reading[None]:
        if (yield from self._buffer.peek()) != "{":
            raise MalformedCallError

    def _arguments(self, tool: OfferedTool) -> Reading[None]:
        """Begins the call, too."""
        buffer = self._buffer
        if tool.lark is not None and (yield from buffer.take(INPUT_OPENING)):
            self._begin(tool, as_written=True)
            if not (yield from buffer.until(INPUT_CLOSING, self._argument)):
                raise MalformedCallError
            return
        yield from self._expect_object()
        self._begin(tool)
        yield from buffer.json_value(self._argument)

    def _named(self) -> Reading[None]:
        buffer = self._buffer
        tool = self._tool((yield from buffer.matched(_NAME)))
        if not (yield from buffer.take(self._family.infix, after_space=True)):
            raise MalformedCallError
        yield from buffer.skip()
        yield from self._arguments(tool)
        self._end()

    def _xml(self) -> Reading[None]:
        """``<function=f>`` with a ``<parameter=k>`` for each argument, as JSON."""
        buffer = self._buffer
        yield from buffer.expect("<function=")
        name = yield from buffer.matched(_NAME)
        yield from buffer.expect(">")
        tool = self._tool(name)
        self._begin(tool, as_written=True)
        opening = "{"
        while not (yield from buffer.take("</function>", after_space=True)):
            if not (yield from buffer.take("<parameter=", after_space=True)):
                raise MalformedCallError
            key = yield from self._xml_key(tool)
            yield from buffer.take("\n")
            if not tool.custom:
                self._argument(f"{opening}{_json(key)}: ")
                opening = ", "
            yield from self._xml_value(tool, key)
        if not tool.custom:
            self._argument("{}" if opening == "{" else "}")
        self._end()

    def _xml_key(self, tool: OfferedTool) -> Reading[str]:
        """Reads the bracket behind it, too. Names on offer may have some of their own."""
        properties = naming(tool.parameters)[1].get("properties")
        for key in properties if isinstance(properties, dict) else ():
            plain = _UNTIL_BRACKET.fullmatch(key)
            if not plain and (yield from self._buffer.take(f"{key}>")):
                return key
        key = yield from self._buffer.matched(_UNTIL_BRACKET)
        yield from self._buffer.expect(">")
        return key

    def _xml_value(self, tool: OfferedTool, key: str) -> Reading[None]:
        """A text is told as it comes, any other value when all of it is there."""
        if tool.custom or is_text(tool.parameters, key):
            quote = "" if tool.custom else '"'
            self._argument(quote)
            tell = self._argument if tool.custom else self._escaped
            if not (yield from self._buffer.until("</parameter>", tell, _without_last_line_end)):
                raise MalformedCallError
            self._argument(quote)
            return
        pieces: list[str] = []
        ended = yield from self._buffer.until("</parameter>", pieces.append, _without_last_line_end)
        if not ended:
            raise MalformedCallError
        written = "".join(pieces).strip()
        try:
            orjson.loads(written)
        except orjson.JSONDecodeError:
            written = _json(written)
        self._argument(written)

    def _escaped(self, text: str) -> None:
        self._argument(_json(text)[1:-1])


def naming(parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The schema that names the arguments, which others may refer to, with its JSON Pointer."""
    place, schema = "#", parameters
    for _ in range(16):  # references may go round
        reference = str(schema.get("$ref"))
        found = resolved(parameters, reference)
        if schema.keys() & _NAMING or not isinstance(found, dict):
            break
        place, schema = from_root(parameters, reference), found
    return place, schema


def is_text(parameters: dict[str, Any], key: str) -> bool:
    """Whether the argument ``key`` is written as it is, not as JSON: a string, by its schema, or
    anything where that says nothing."""
    properties = naming(parameters)[1].get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return True
    return schema.get("type") == "string" or not schema.keys() & {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
    }


def unheld_apart(parameters: dict[str, Any]) -> Iterator[str]:
    """What no grammar of one argument after the other holds, as `unheld_places` tells it."""
    place, schema = naming(parameters)
    names, required = schema.get("properties"), schema.get("required")
    named = [*names] if isinstance(names, dict) else []
    unheld = [each for each in ("$ref", *_OF_ALL) if each in schema]
    if isinstance(required, list) and any(name not in named for name in required):
        unheld.append("required")
    if not named and schema.get("additionalProperties") not in (None, True, False, {}):
        unheld.append("additionalProperties")
    for each in unheld:
        yield f"'{each}' at '{shortened(place)}/{each}' (arguments are written one by one)"


def _json(text: str) -> str:
    return orjson.dumps(text).decode()


def _without_last_line_end(text: str) -> str:
    return text.removesuffix("\n")


def _input_of(written: str) -> str:
    """The input of a custom tool, from its arguments; of those that were cut what is there."""
    try:
        told = from_json(written, allow_partial="trailing-strings")
    except ValueError:
        return written
    value = told.get(INPUT, "")
    return value if isinstance(value, str) else _json(value)
