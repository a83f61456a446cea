"""What a whole reply must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson


def not_held(what: str) -> str:
    """Why a grammar is refused that must hold everything."""
    return f"no grammar holds {what}; without 'strict' it is left to the model"


def left_to_model(what: str) -> str:
    """A note about a grammar that holds the rest."""
    return f"{what} was left to the model"


@dataclass(frozen=True, slots=True)
class Constraint:
    """``grammar`` is one grammar object of llguidance, with one key: ``{"json_schema": {...}}`` or
    ``{"lark_grammar": "..."}``. ``field`` is the request field that asked for it, which errors
    name. ``schemas`` are the JSON Schemas in it, which errors and notes point into; ``notes`` say
    what the grammar cannot hold and was left to the model, a sentence each.
    """

    grammar: dict[str, Any]
    field: str
    schemas: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The top-level grammar, as `SamplingParameters.grammar` takes it."""
        return orjson.dumps({"grammars": [self.grammar]}).decode()
