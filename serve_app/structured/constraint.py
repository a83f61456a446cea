"""What a whole reply must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Constraint:
    """``grammar`` is one grammar object of llguidance, with one key: ``{"json_schema": {...}}`` or
    ``{"lark_grammar": "..."}``. A Lark grammar may refer to the ``named`` ones, which have a
    ``"name"`` besides, as ``@name``. ``field`` is the request field that asked for it, which errors
    name. ``schemas`` are the JSON Schemas in it, which errors and notes point into; ``notes`` say
    what the grammar cannot hold and was left to the model, a sentence each.
    """

    grammar: dict[str, Any]
    field: str
    schemas: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    named: tuple[dict[str, Any], ...] = ()

    def text(self) -> str:
        """The top-level grammar, as `SamplingParameters.grammar` takes it."""
        return orjson.dumps({"grammars": [self.grammar, *self.named]}).decode()
