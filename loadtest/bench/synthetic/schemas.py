"""What outputs of the engine benchmark must be where they are constrained. None comes to an end."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

SchemaName = Literal["records", "string"]
NAMES = get_args(SchemaName)
# About half of the tokens of an output are forced: names of fields, and what stands between.
RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 400,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{4,8}( [A-Z][a-z]{4,8})$"},
            "years": {"type": "integer", "minimum": 1, "maximum": 99},
            "happy": {"type": "boolean"},
        },
        "required": ["name", "years", "happy"],
        "additionalProperties": False,
    },
}
# Any text without quotes: nearly all tokens are allowed at every place.
STRING = 'start: /"[^"\\\\]*\\u2020/'


def grammar_of(name: SchemaName) -> str:
    """As llguidance reads it."""
    if name == "string":
        return STRING
    return json.dumps(
        {"grammars": [{"json_schema": {**RECORDS, "x-guidance": {"whitespace_flexible": False}}}]}
    )
