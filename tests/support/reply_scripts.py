"""Replies as models of every family write them, and what they say: made from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lexshard.serve_app.tools.families import FAMILIES_BY_NAME, REASONING, ReplyFormat, ToolFamily
from lexshard.serve_app.tools.offer import OfferedTool
from lexshard.serve_app.tools.reply_parser import ReplyParser

THINK = REASONING[0]
WORDS = (
    *("sun", "naïve", "日本", "🦊", "a < b", '"quoted"', "back\\slash", "{", "}", "[1, 2]", "\n"),
    *("<tool", "</tool_call", "[TOOL", "<think", "</parameter", "; ", "\t", "`x`", "<", "tail"),
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "deep": {"type": "object"},
        "any": {"type": ["string", "null", "array"]},
    },
}
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
TOOLS: Mapping[str, OfferedTool] = {
    tool.name: tool
    for tool in (
        OfferedTool("get", None, PARAMETERS, "tools.0.function"),
        OfferedTool("get_all.v2", None, PARAMETERS, "tools.1.function"),
        OfferedTool("say", None, CUSTOM_PARAMETERS, "tools.2.custom", False, True),
        OfferedTool(
            "run", None, CUSTOM_PARAMETERS, "tools.3.custom", custom=True, lark="start: /a/"
        ),
    )
}


@dataclass
class Said:
    """What a reply says; of each call its name and the text of its arguments or input."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def format_of(family: str, thinks: bool = True) -> ReplyFormat:
    return ReplyFormat(FAMILIES_BY_NAME[family], THINK if thinks else None, {})


def parsed(parser: ReplyParser, pieces: list[str]) -> Said:
    """What ``parser`` makes of a reply that comes in such pieces."""
    said = Said()
    for i, piece in enumerate(pieces):
        spoken = parser.feed(piece, i + 1 == len(pieces))
        said.reasoning += spoken.reasoning
        said.content += spoken.content
        for call in spoken.calls:
            if call.name is not None:
                assert call.index == len(said.calls)
                assert call.call_id
                said.calls.append((call.name, ""))
            name, text = said.calls[call.index]
            said.calls[call.index] = (name, text + call.text)
    return said


def words(chance: random.Random, most: int = 6) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(0, most)))


def _value(chance: random.Random, key: str) -> Any:
    if key == "text":
        return words(chance)
    if key == "count":
        return chance.randint(-5, 10**12)
    if key == "deep":
        return {"a": [words(chance), {"b": None}], "é\n": 1.5e-7, "": {}}
    return chance.choice([None, [], [words(chance), True]])


def _written(chance: random.Random, family: ToolFamily, tool: OfferedTool) -> tuple[str, str]:
    """A call as it stands between the marks, and the text that clients get of it."""
    spaces: dict[str, Any] = {"ensure_ascii": chance.random() < 0.3}
    if chance.random() < 0.3:
        spaces["separators"] = (",", ":")
    elif chance.random() < 0.2:
        spaces["indent"] = 2
    if tool.custom:
        text = words(chance).replace("</", "<")
        arguments = json.dumps({"input": text}, **spaces)
        if tool.lark is not None:
            arguments = f"<input>{text}</input>"
        values: dict[str, Any] = {"input": text}
        told = text
    else:
        keys = [key for key in ("text", "count", "deep", "any") if chance.random() < 0.6]
        values = {key: _value(chance, key) for key in keys}
        arguments = told = json.dumps(values, **spaces)
    if family.body == "xml":
        parts = []
        shown = []
        for key, value in values.items():
            raw = isinstance(value, str)
            text = value.replace("</parameter", "") if raw else json.dumps(value)
            parts.append(f"<parameter={key}>\n{text}\n</parameter>\n")
            shown.append(f'"{key}": ' + (json.dumps(text, ensure_ascii=False) if raw else text))
            told = text
        if not tool.custom:
            told = "{" + ", ".join(shown) + "}"
        return f"<function={tool.name}>\n{''.join(parts)}</function>", told
    if family.body == "named":
        return f"{tool.name}{family.infix}{arguments}", told
    name = f'"{family.name_key}": "{tool.name}"'
    members = [name, f'"{family.arguments_key}": {arguments}']
    if tool.lark is None and chance.random() < 0.2:
        members.reverse()
    if chance.random() < 0.2:
        members.insert(chance.randint(0, 2), '"id": "a\\"b}"')
    return "{" + ", ".join(members) + "}", told


def reply(chance: random.Random, family_name: str) -> tuple[str, Said]:
    """A reply of such a family that is whole, and what it says."""
    family = FAMILIES_BY_NAME[family_name]
    said = Said()
    text = ""
    if chance.random() < 0.5:
        thought = words(chance).replace("</", "<").strip("\n")
        text += chance.choice(["", "\n"]) + f"<think>\n{thought}\n</think>\n\n"
        said.reasoning = thought
    chosen = [chance.choice(list(TOOLS.values())) for _ in range(chance.randint(0, 3))]
    content = "Well: " + words(chance) if not chosen or not family.bare else ""
    content = content if not chosen or chance.random() < 0.5 else ""
    if family.opening:
        content = content.replace(family.opening, "")
    said.content = content.rstrip() if chosen else content
    text += content + (chance.choice(["", " ", "\n\n"]) if chosen and content else "")
    written = []
    for tool in chosen:
        body, told = _written(chance, family, tool)
        written.append(body)
        said.calls.append((tool.name, told))
    if not written:
        return text, said
    if family.body == "list":
        text += f"{family.opening}[{', '.join(written)}]{family.closing}"
    elif family.bare:
        text += chance.choice([family.opening, ""]) + "; ".join(written)
    else:
        space = chance.choice([family.padding, family.padding, ""])
        opening, closing = family.opening + space, space + family.closing
        text += family.between.join(opening + body + closing for body in written)
    return text, said
