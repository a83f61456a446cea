"""``/docs``: the description as one page that loads nothing from anywhere, for there may be no
network but the one to this server."""

from __future__ import annotations

import json
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; font: bold 1.1rem ui-monospace, monospace }
code, pre { font: 13px ui-monospace, monospace }
pre { background: #8882; padding: .7rem; overflow-x: auto }
table { border-collapse: collapse; width: 100% }
td, th { border-top: 1px solid #8885; padding: .25rem .6rem .25rem 0 }
td, th { text-align: left; vertical-align: top }
td:first-child { white-space: nowrap }
:root { color-scheme: light dark }
"""
BOUNDS = {
    "minimum": "from {}",
    "maximum": "to {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
    "pattern": "like {}",
}


def docs_page(description: dict[str, Any]) -> str:
    """The HTML of what `describe` made."""
    schemas = description["components"]["schemas"]
    info = description["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{info['title']}</title>",
        f"<style>{STYLE}</style><h1>{info['title']} {escape(info['version'])}</h1>",
        "<p>OpenAI's protocol. For programs: <a href=openapi.json>openapi.json</a>.",
    ]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{operation['summary']}.")
            parts += _responses(operation["responses"])
            for name in _models(operation.get("requestBody", {})):
                key = ' -H "Authorization: Bearer $KEY"' if "security" in operation else ""
                parts += _request(f"$URL{path}{key}", schemas[name])
    named = [name for name in schemas if not name.endswith("Request")]
    for name in sorted(named, key=lambda name: name not in ("ErrorReply", "ErrorObject")):
        parts += [f"<h2 id={name}>{name}</h2>", *_fields(schemas[name])]
    return "\n".join(parts)


def _models(body: dict[str, Any]) -> list[str]:
    schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    return [each["$ref"].rpartition("/")[2] for each in schema.get("anyOf", [schema]) if each]


def _responses(responses: dict[str, Any]) -> list[str]:
    rows = [
        f"<tr><td>{status}<td>{escape(each['description'])}<td>"
        + " or ".join(_content(kind, content) for kind, content in each["content"].items())
        for status, each in responses.items()
    ]
    return ["<table><tr><th>status<th>when<th>what", *rows, "</table>"]


def _content(kind: str, content: dict[str, Any]) -> str:
    if "itemSchema" in content:
        data = content["itemSchema"]["properties"]["data"]
        held, *ends = data.get("anyOf", [data])
        then = "".join(f", then {end['const']}" for end in ends)
        return f"{kind} of {_kind(held['contentSchema'])}{then}"
    schema = content["schema"]
    return _kind(schema) if "$ref" in schema else kind


def _request(to: str, schema: dict[str, Any]) -> list[str]:
    shown = [
        f"<pre>curl {escape(to)} -H 'Content-Type: application/json' \\\n"
        f"  -d '{escape(json.dumps(example))}'</pre>"
        for example in schema["examples"]
    ]
    return [*shown, *_fields(schema)]


def _fields(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{name}</code>{' *' if name in required else ''}"
        f"<td>{_kind(field)}<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    ]
    return ["<table><tr><th>field<th>type<th>meaning", *rows, "</table>"]


def _kind(schema: dict[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return escape(" or ".join(json.dumps(value) for value in values))
    kind = schema.get("type", "anything")
    words = kind if isinstance(kind, str) else " or ".join(kind)
    bounds = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    words = ", ".join([words, *map(escape, bounds)])
    if "items" in schema:
        words += f" of ({_kind(schema['items'])})"
    elif "properties" in schema:
        words += " with " + ", ".join(schema["properties"])
    return words
