"""One grammar for a whole reply: what it thinks, says, calls and answers, as llguidance reads it.

A mark that is one token of the model's is that token; where it is spelled, the text before it ends
with the first one. So thinking is free until its closing mark, and text until a call begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

import orjson

from lexshard.serve_app.structured.schemas import (
    OPTIONS,
    JsonStyle,
    escaped,
    in_root,
    json_grammar,
    parts,
    schema_bytes,
    under_root,
)
from lexshard.serve_app.tools.calls import INPUT_CLOSING, INPUT_OPENING, is_text, naming
from lexshard.serve_app.tools.families import ReplyFormat, ToolFamily
from lexshard.serve_app.tools.offer import INPUT, Offer, OfferedTool

_STYLE = JsonStyle()
# What says nothing about which JSON fits, and is most of what clients send.
_ANNOTATIONS = ("title", "description", "default", "examples", "$comment")
_PARAMETER_END = "\n</parameter>\n"


def quoted(text: str) -> str:
    """A text as a terminal of Lark."""
    return json.dumps(text, ensure_ascii=False)


# Where a reply begins: before what the model may think, amid it, or after it.
Beginning = Literal["free", "thinking", "thought"]
_ANY = "ANY: /(?s:.*)/"
# Between what was thought and what must follow.
_GAP = r"GAP: /\n{1,4}/"


def reply_grammar(
    format: ReplyFormat,
    beginning: Beginning,
    offer: Offer | None,
    answer: Mapping[str, Any] | None,
    loose: bool = False,
) -> str | None:
    """The grammar of a reply that may call what is on ``offer``, None for nothing, and whose answer
    must match ``answer``, a grammar object of llguidance, None for any. None where any reply will
    do. ``loose``: arguments of functions that are not strict are any object.
    """
    if offer is None and answer is None:
        return None
    return _ReplyGrammar(format, loose).text(beginning, offer, answer)


class _ReplyGrammar:
    """Collects lines of Lark, and the grammars they name, those of calls apart. ``loose`` as in
    `reply_grammar`."""

    def __init__(self, format: ReplyFormat, loose: bool) -> None:
        self._format = format
        self._loose = loose
        self._lines: list[str] = []
        self._call_lines: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._count = 0

    def text(
        self, beginning: Beginning, offer: Offer | None, answer: Mapping[str, Any] | None
    ) -> str:
        thinks = self._thinking(beginning)
        if offer is None or self._format.tools is None:
            body = "@answer"
        else:
            body = self._calls(self._format.tools, offer)
            if not offer.required:
                body = self._or_calls(self._format.tools, offer, answer)
        optional = {"free": "think?", "thinking": "think", "thought": ""}[beginning]
        lines = [
            "%llguidance {}",
            f"start: {optional if thinks else ''} {body}",
            _ANY,
            _GAP,
            *self._lines,
            *self._call_lines,
        ]
        grammars: list[Mapping[str, Any]] = [{"name": "reply", "lark_grammar": "\n".join(lines)}]
        if answer is not None and "@answer" in body:
            grammars.append({**answer, "name": "answer"})
        return orjson.dumps({"grammars": [*grammars, *self._grammars]}).decode()

    def _mark(self, mark: str) -> str:
        token = self._format.token_ids.get(mark)
        return quoted(mark) if token is None else f"<[{token}]>"

    def _is_token(self, mark: str) -> bool:
        return mark in self._format.token_ids

    def _thinking(self, beginning: Beginning) -> bool:
        """Whether the reply may think."""
        marks = self._format.reasoning
        if marks is None or beginning == "thought":
            return False
        opening = self._mark(marks.opening) if beginning == "free" else ""
        self._lines.append(f"think: {opening} thinking GAP?")
        if self._is_token(marks.closing):
            # Spelled it would end nothing: a model that begins to is led to the token.
            self._lines.append(f"THOUGHT: ANY & ~(ANY {quoted(marks.closing)} ANY)")
            self._lines.append(f"thinking: THOUGHT {self._mark(marks.closing)}")
        else:
            self._lines.append(f"thinking[lazy]: ANY {quoted(marks.closing)}")
        return True

    def _calls(self, family: ToolFamily, offer: Offer) -> str:
        """A reply that calls at once."""
        tools = offer.callable.values()
        one = " | ".join(self._call(family, tool) for tool in tools)
        padding = quoted(family.padding) if family.padding else ""
        closing = self._mark(family.closing) if family.closing else ""
        between = quoted(family.between) if family.between else ""
        several = "" if offer.single else f"({between} one)*"
        self._lines.append(f"one: {one}")
        if family.body == "list" and family.bare:
            # A text could begin with the bracket, too, and would: its terminal is the longer one.
            first = " | ".join(self._call(family, tool, "[") for tool in tools)
            self._lines.append(f"first: {first}")
            inside = f'first {several} "]"'
        elif family.body == "list":
            inside = f'"[" one {several} "]" {closing}'
        elif family.bare:
            inside = f"one {several} {closing}"
        else:
            inside = f"{padding} one {padding} {closing}"
        self._lines.append(f"inside: {inside}")
        if family.bare:
            opened = self._mark(family.opening) if self._is_token(family.opening) else ""
            self._lines.append(f"calls: {opened}{'?' if opened else ''} inside")
            return "calls"
        opened = self._mark(family.opening)
        repeated = family.body != "list" and not offer.single
        again = f"({between} {opened} inside)*" if repeated else ""
        self._lines.append(f"calls: {opened} inside {again}")
        return "calls"

    def _or_calls(self, family: ToolFamily, offer: Offer, answer: Mapping[str, Any] | None) -> str:
        """A reply that may call: else it is ``answer``, or without one a text, in which calls may
        be."""
        if answer is not None and family.bare and "json_schema" in answer:
            # Both begin as JSON does, and can be told apart only where both are JSON.
            options = answer["json_schema"].get(OPTIONS, {})
            tools = offer.callable.values()
            calls = (self._json_call(family, each, options) for each in tools)
            return f"(@answer | {' | '.join(calls)})"
        if answer is not None:
            return "(@answer | calls)"
        # No text begins as if it were thought: it would be read so.
        marks = self._format.reasoning
        first = f"~(/\\s*/ {quoted(marks.opening)} ANY)" if marks else ""
        if family.bare:
            keys = "|".join(sorted({family.name_key, "arguments", "parameters"}))
            called = rf'/\s*(\[\s*)?\{{\s*"({keys})"\s*:/'
            opened = f"(/\\s*/ {quoted(family.opening)})? " if family.opening else ""
            # Line ends after what was thought are none of a text's, as they are none of a call's.
            excluded = [f"~({opened}{called} ANY)", *([first, '~("\\n" ANY)'] if first else [])]
            self._lines.append(f"TEXT: {' & '.join(['ANY', *excluded])}")
            return "(TEXT | calls)"
        opening = family.opening
        if self._is_token(opening):
            spelled = f"~(ANY {quoted(opening)} ANY)"
            self._lines.append(f"REST: ANY & {spelled}")
            self._lines.append(f"FIRST: {' & '.join(['REST', *([first] if first else [])])}")
            mark = self._mark(opening)
            again = "" if offer.single or family.body == "list" else f"(REST {mark} inside)* REST"
            return f"(FIRST | FIRST {mark} inside {again})"
        self._lines.append(f"FIRST: {' & '.join(['ANY', *([first] if first else [])])}")
        self._lines.append(f"head[lazy]: FIRST {quoted(opening)}")
        self._lines.append(f"more[lazy]: ANY {quoted(opening)}")
        again = "" if offer.single or family.body == "list" else "(more inside)* ANY"
        return f"(FIRST | head inside {again})"

    def _call(self, family: ToolFamily, tool: OfferedTool, before: str = "") -> str:
        """The rule of a call of ``tool`` without the marks around it. What stands ``before`` an
        object is of one terminal with its beginning."""
        self._count += 1
        rule = f"call_{self._count}"
        if family.body == "xml":
            content = self._xml(tool)
        elif family.body == "named":
            content = f"{quoted(tool.name)} {self._mark(family.infix)} {self._arguments(tool)}"
        else:
            head = f'{before}{{"{family.name_key}": "{tool.name}", "{family.arguments_key}": '
            content = f'{quoted(head)} {self._arguments(tool)} "}}"'
        self._call_lines.append(f"{rule}: {content}")
        return rule

    def _json_call(self, family: ToolFamily, tool: OfferedTool, options: Mapping[str, Any]) -> str:
        """The rule of a call that is JSON as a whole, whose white space is that of ``options``."""
        self._count += 1
        rule = f"call_{self._count}"
        place = f"{tool.place}.parameters"
        arguments = json_grammar(self._schema(tool), _STYLE, strict=tool.strict, field=place)
        del arguments[OPTIONS]  # those of all of it are below
        schema = {
            "$defs": under_root(arguments),
            "type": "object",
            "properties": {
                family.name_key: {"const": tool.name},
                family.arguments_key: {"$ref": in_root("#")},
            },
            "required": [family.name_key, family.arguments_key],
            "additionalProperties": False,
        }
        strictness = {"lenient": not tool.strict, "coerce_one_of": not tool.strict}
        schema[OPTIONS] = {**options, **strictness}
        self._call_lines.append(f"{rule}: {self._named({'json_schema': schema})}")
        return rule

    def _arguments(self, tool: OfferedTool) -> str:
        rule = f"arguments_{self._count}"
        if tool.lark is not None:
            named = self._lark(tool.lark)
            self._call_lines.append(
                f"{rule}: {quoted(INPUT_OPENING)} {named} {quoted(INPUT_CLOSING)}"
            )
        else:
            self._call_lines.append(f"{rule}: {self._json(tool, self._schema(tool))}")
        return rule

    def _schema(self, tool: OfferedTool) -> dict[str, Any]:
        if self._loose and not tool.strict:
            return {"type": "object"}
        data = schema_bytes(tool.parameters, f"{tool.place}.parameters")
        schema: dict[str, Any] = orjson.loads(data)
        for _, part in list(parts(schema)):
            for name in _ANNOTATIONS:
                part.pop(name, None)
        return schema

    def _json(self, tool: OfferedTool, schema: dict[str, Any]) -> str:
        place = f"{tool.place}.parameters"
        grammar = json_grammar(schema, _STYLE, strict=tool.strict, field=place)
        return self._named({"json_schema": grammar})

    def _lark(self, definition: str) -> str:
        return self._named({"lark_grammar": definition})

    def _named(self, grammar: dict[str, Any]) -> str:
        """A grammar of its own, so that what is wrong with it is told of it alone."""
        name = f"part_{len(self._grammars) + 1}"
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _xml(self, tool: OfferedTool) -> str:
        schema = self._schema(tool)
        place, named = naming(schema)
        head, tail = quoted(f"<function={tool.name}>\n"), quoted("</function>")
        properties = named.get("properties")
        if not isinstance(properties, dict) or not properties:
            # Any arguments, as texts, unless there must be none.
            none = named.get("additionalProperties") is False
            name = f'"<parameter=" /[^<>\\n]+/ ">\\n" {self._text()}'
            return f"{head} {'' if none else f'({name})*'} {tail}"
        required = named.get("required")
        required = required if isinstance(required, list) else []
        shared = under_root(schema)
        items = []
        for key, part in properties.items():
            if tool.lark is not None and key == INPUT:
                value = f"{self._lark(tool.lark)} {quoted(_PARAMETER_END)}"
            else:
                whole = in_root(f"{place}/properties/{quote(escaped(key))}")
                value = self._xml_value(tool, key, part, {"$ref": whole, "$defs": shared})
            item = f"{quoted(f'<parameter={key}>' + chr(10))} {value}"
            items.append(item if key in required else f"({item})?")
        return f"{head} {' '.join(items)} {tail}"

    def _xml_value(self, tool: OfferedTool, key: str, part: Any, whole: dict[str, Any]) -> str:
        """``whole`` is the schema ``part`` of an argument with all that it may refer to."""
        part = part if isinstance(part, dict) else {}
        choices = [part["const"]] if "const" in part else part.get("enum")
        if not is_text(tool.parameters, key):
            refers = any("$ref" in each for _, each in parts(part))
            rule = f"value_{len(self._call_lines)}_{self._count}"
            self._call_lines.append(f"{rule}: {self._json(tool, whole if refers else part)}")
            return f"{rule} {quoted(_PARAMETER_END)}"
        if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
            return f"({' | '.join(map(quoted, choices))}) {quoted(_PARAMETER_END)}"
        if tool.custom and "pattern" in part:
            from llguidance import regex_to_lark  # 8 MB, of which most servers have no need

            written = regex_to_lark(part["pattern"])
            return f"{self._lark(f'start: /{written}/')} {quoted(_PARAMETER_END)}"
        return self._text()

    def _text(self) -> str:
        """A text, which ends where it is read to end: with the first mark, on a line of its own or
        not."""
        rule = f"text_{len(self._call_lines)}_{self._count}"
        self._call_lines.append(f"{rule}[lazy]: ANY {quoted(_PARAMETER_END.strip())}")
        return f'{rule} "\\n"'


def calls_grammar(format: ReplyFormat, tools: Sequence[OfferedTool], loose: bool) -> str:
    """The grammar of nothing but a call, which tells whether ``tools`` can be held to."""
    offer = Offer({tool.name: tool for tool in tools}, True, True)
    text = reply_grammar(format, "thought", offer, None, loose)
    assert text is not None  # there are tools
    return text
