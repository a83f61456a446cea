"""What a grammar cannot hold, told by the keywords of its schemas and where they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from lexshard.serve_app.openai.errors import ApiError, bad_request, shortened
from lexshard.serve_app.structured.compiling import Compiled
from lexshard.serve_app.structured.constraint import Constraint, left_to_model, not_held
from lexshard.serve_app.structured.schemas import parts

MOST_NOTES = 32
_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
_FORMAT = re.compile(r"Unknown format: (.*)", re.DOTALL)
_PANIC = "panic:"  # of llguidance, about what it did not expect


def checked_notes(compiled: Compiled, constraint: Constraint) -> tuple[str, ...]:
    """What the grammar of a constraint leaves to the model, a sentence each.

    Raises:
        ApiError: 400 naming the constraint's field where it is no grammar.
    """
    if compiled.error is not None:
        raise _refusal(compiled.error, constraint)
    notes = dict.fromkeys(constraint.notes)
    for warning in dict.fromkeys(compiled.warnings):
        told = list(dict.fromkeys(_unheld(warning, constraint.schemas)))
        notes |= dict.fromkeys(map(left_to_model, told))
        if not told:
            notes[_line(warning)] = None
    if len(notes) > MOST_NOTES:
        return (*list(notes)[:MOST_NOTES], f"and {len(notes) - MOST_NOTES} more")
    return tuple(notes)


def _refusal(error: str, constraint: Constraint) -> ApiError:
    field = constraint.field
    unheld = next(_unheld(error, constraint.schemas), None)
    if unheld is not None:
        return bad_request(f"'{field}': {not_held(unheld)}", field)
    if error.startswith(_PANIC):
        error = "it cannot be compiled"
    elif "recursion limit exceeded" in error:
        error = "it is nested too deeply"
    return bad_request(f"'{field}': {_line(error)}", field)


def _line(text: str) -> str:
    return shortened(" ".join(text.replace("<non-verbose/>", "").split()))


def _unheld(message: str, schemas: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where the keywords stand that llguidance complains of; of ``oneOf`` it may be only some."""
    if found := _KEYWORDS.search(message):
        keywords = orjson.loads(found[1])
        yield from _places(schemas, keywords)
    elif found := _FORMAT.search(message):
        for place, part in _parts(schemas):
            if part.get("format") == found[1].strip():
                yield f"'format' {shortened(found[1].strip())!r} at '{place}/format'"
    elif "oneOf" in message:
        yield from _places(schemas, ["oneOf"])


def _places(schemas: Sequence[dict[str, Any]], keywords: Sequence[str]) -> Iterator[str]:
    for place, part in _parts(schemas):
        yield from (f"'{each}' at '{shortened(place)}/{each}'" for each in keywords if each in part)


def _parts(schemas: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for schema in schemas:
        yield from parts(schema)
