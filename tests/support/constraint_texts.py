"""Which texts a constraint of a request lets through, byte by byte."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lexshard.actors.grammar.limits import PARSER
from lexshard.serve_app.structured.constraint import Constraint
from lexshard.serve_app.structured.fields import ConstraintFields
from lexshard.serve_app.structured.reading import read_constraint

BYTES = LLTokenizer("byte")
LIMITS = LLParserLimits(**PARSER)


def read(fields: dict[str, Any], special_tokens: tuple[str, ...] = ()) -> Constraint:
    constraint = read_constraint(ConstraintFields.model_validate(fields), special_tokens)
    assert constraint is not None
    return constraint


def matches(matcher: LLMatcher, text: str) -> bool:
    matcher.reset()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
