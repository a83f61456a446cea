"""The grammar of one call: its name, as its family writes it, and its arguments by their schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from lexshard.serve_app.structured.schemas import OPTIONS, JsonStyle, json_grammar, parts
from lexshard.serve_app.tools.calls import INPUT_CLOSING, INPUT_OPENING, is_text
from lexshard.serve_app.tools.families import ToolFamily
from lexshard.serve_app.tools.offer import INPUT, OfferedTool

_STYLE = JsonStyle()
# What says nothing about which JSON fits, and is most of what clients send.
_ANNOTATIONS = ("title", "description", "default", "examples", "$comment")
_DEFINITIONS = ("$defs", "definitions")  # which references mean from the root on
_PARAMETER_END = "\n</parameter>\n"


def quoted(text: str) -> str:
    """A text as a terminal of Lark."""
    return json.dumps(text, ensure_ascii=False)


class ArgumentGrammars:
    """Collects ``lines`` of Lark, and the ``grammars`` they name, for calls of several tools."""

    def __init__(self, loose: bool) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._loose = loose
        self._count = 0

    def call(
        self, family: ToolFamily, tool: OfferedTool, mark: Callable[[str], str], before: str = ""
    ) -> str:
        """The rule of a call of ``tool`` without the marks around it; ``mark`` writes a mark. What
        stands ``before`` an object is of one terminal with its beginning."""
        self._count += 1
        rule = f"call_{self._count}"
        if family.body == "xml":
            content = self._xml(tool)
        elif family.body == "named":
            content = f"{quoted(tool.name)} {mark(family.infix)} {self._arguments(tool)}"
        else:
            head = f'{before}{{"{family.name_key}": "{tool.name}", "{family.arguments_key}": '
            content = f'{quoted(head)} {self._arguments(tool)} "}}"'
        self.lines.append(f"{rule}: {content}")
        return rule

    def json_call(self, family: ToolFamily, tool: OfferedTool, options: Mapping[str, Any]) -> str:
        """The rule of a call that is JSON as a whole, whose white space is that of ``options``."""
        self._count += 1
        rule = f"call_{self._count}"
        arguments = self._schema(tool)
        schema = {
            **{name: arguments.pop(name) for name in _DEFINITIONS if name in arguments},
            "type": "object",
            "properties": {
                family.name_key: {"const": tool.name},
                family.arguments_key: arguments,
            },
            "required": [family.name_key, family.arguments_key],
            "additionalProperties": False,
        }
        strictness = {"lenient": not tool.strict, "coerce_one_of": not tool.strict}
        schema[OPTIONS] = {**options, **strictness}
        self.lines.append(f"{rule}: {self._named({'json_schema': schema})}")
        return rule

    def _arguments(self, tool: OfferedTool) -> str:
        rule = f"arguments_{self._count}"
        if tool.lark is not None:
            named = self._lark(tool.lark)
            self.lines.append(f"{rule}: {quoted(INPUT_OPENING)} {named} {quoted(INPUT_CLOSING)}")
        else:
            self.lines.append(f"{rule}: {self._json(tool, self._schema(tool))}")
        return rule

    def _schema(self, tool: OfferedTool) -> dict[str, Any]:
        if self._loose and not tool.strict:
            return {"type": "object"}
        schema: dict[str, Any] = orjson.loads(orjson.dumps(tool.parameters))
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
        name = f"part_{len(self.grammars) + 1}"
        self.grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _xml(self, tool: OfferedTool) -> str:
        schema = self._schema(tool)
        head, tail = quoted(f"<function={tool.name}>\n"), quoted("</function>")
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            # Any arguments, as texts, unless there must be none.
            none = schema.get("additionalProperties") is False
            name = f'"<parameter=" /[^<>\\n]+/ ">\\n" {self._text()}'
            return f"{head} {'' if none else f'({name})*'} {tail}"
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
        items = []
        for key, part in properties.items():
            if tool.lark is not None and key == INPUT:
                value = f"{self._lark(tool.lark)} {quoted(_PARAMETER_END)}"
            else:
                value = self._xml_value(tool, key, part, shared)
            item = f"{quoted(f'<parameter={key}>' + chr(10))} {value}"
            items.append(item if key in required else f"({item})?")
        return f"{head} {' '.join(items)} {tail}"

    def _xml_value(self, tool: OfferedTool, key: str, part: Any, shared: dict[str, Any]) -> str:
        part = part if isinstance(part, dict) else {}
        choices = [part["const"]] if "const" in part else part.get("enum")
        if not is_text(tool.parameters, key):
            rule = f"value_{len(self.lines)}_{self._count}"
            self.lines.append(f"{rule}: {self._json(tool, {**shared, **part})}")
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
        rule = f"text_{len(self.lines)}_{self._count}"
        self.lines.append(f"{rule}[lazy]: ANY {quoted(_PARAMETER_END.strip())}")
        return f'{rule} "\\n"'
