"""What a whole reply must match, and what a grammar of it may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from lexshard.serve_app.openai.errors import ApiError

# What a grammar may cost, as measured on one core of an AMD EPYC with 128,000 tokens.
# Of a top-level grammar. One of 100 KiB that is no attack (thousands of choices, hundreds of
# objects with properties) takes 0.05 to 0.3 s; one real schema in 150 is larger than 128 KiB.
MAX_TEXT_BYTES: Final = 256 * 1024
# It is translated in a worker's thread, in a time that grows with its square: 0.4 s.
MAX_GBNF_CHARACTERS: Final = 16 * 1024
# Of one compilation and its first mask. It takes as long again in the engine.
MAX_SECONDS: Final = 0.5
MAX_BYTES: Final = 256 * 1024 * 1024
# Grammars without end recurse without end, in threads whose stack is as large.
STACK_BYTES: Final = 2 * 1024 * 1024


class RefusedGrammarError(ApiError):
    """400 for a grammar that ``field`` makes. ``too_much``: it may be one, and costs more than one
    may."""

    def __init__(self, message: str, field: str, too_much: bool = False) -> None:
        super().__init__(400, message, field, code="invalid_value")
        self.too_much = too_much


def check_size(size: int, field: str) -> None:
    """Raises:
    RefusedGrammarError: 400 naming ``field`` where its grammar has more bytes than are compiled.
    """
    if size > MAX_TEXT_BYTES:
        told = f"'{field}' makes a grammar of {size} bytes, more than {MAX_TEXT_BYTES}"
        raise RefusedGrammarError(told, field, too_much=True)


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
    what the grammar cannot hold and was left to the model, a sentence each. ``whole`` is the
    top-level grammar of a reply of which what must match is a part.
    """

    grammar: dict[str, Any]
    field: str
    schemas: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    whole: str | None = None

    @property
    def held(self) -> bool:
        """Whether there is a grammar, and not only notes."""
        return bool(self.grammar or self.whole)

    def text(self) -> str:
        """The top-level grammar, as `SamplingParameters.grammar` takes it."""
        return self.whole or orjson.dumps({"grammars": [self.grammar]}).decode()
