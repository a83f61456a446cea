"""From the fields of a request to a constraint that is known to compile, with what it cannot hold
told by the keywords of its schemas and where they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import GenerationFields
from lexshard.serve_app.openai.workers import SHORT_TEXT
from lexshard.serve_app.structured.compiling import Compiled
from lexshard.serve_app.structured.constraint import (
    Constraint,
    RefusedGrammarError,
    left_to_model,
    not_held,
)
from lexshard.serve_app.structured.fields import ConstraintFields
from lexshard.serve_app.structured.grammar_process import TOO_MUCH
from lexshard.serve_app.structured.reading import read_constraint
from lexshard.serve_app.structured.schemas import parts

# A whole reply, from what its answer must match.
Around = Callable[[Constraint | None], Constraint | None]
NEVER_ENDS = "what a reply must match says where it ends"


async def constraint_of(
    call: HttpCall, fields: GenerationFields, around: Around | None
) -> Constraint | None:
    """What the output of a request must match, known to compile, with what was left to the model:
    it may be all.
    ``around`` makes a grammar of the whole output from that of the answer in it.

    Raises:
        ApiError: 400 naming the field that asks for what is no constraint, or that none can stand
            beside; 503 where too many grammars wait.
        ClientDisconnectedError: the client left.
    """
    constraint = None
    if asks_for_constraint(fields):
        work = partial(read_constraint, fields, call.state.tokenizer.special_tokens())
        constraint = await call.run(SHORT_TEXT + 1, work)
    if around is not None:
        constraint = around(constraint)
    if constraint is None or not constraint.held:
        return constraint
    _check_beside(fields, constraint.field)
    return await checked(call, constraint)


async def checked(call: HttpCall, constraint: Constraint) -> Constraint:
    """A constraint that is known to compile, with notes of what it leaves to the model.

    Raises:
        RefusedGrammarError: 400 naming its field where it is no grammar.
        ApiError: 503 where too many wait.
    """
    text, field, state = constraint.text(), constraint.field, call.state
    information, receive = state.information(), call.request.receive
    client = call.record.client
    compiled = await state.grammars.compiled(text, field, information, receive, client)
    return replace(constraint, notes=checked_notes(compiled, constraint))


def asks_for_constraint(fields: ConstraintFields) -> bool:
    """Whether any field says what a reply must match."""
    wanted = fields.response_format
    if wanted is not None and wanted.type != "text":
        return True
    others = ConstraintFields.model_fields.keys() - {"response_format"}
    return any(getattr(fields, name) is not None for name in others)


def _check_beside(fields: GenerationFields, constrained: str) -> None:
    """Raises:
    ApiError: 400 for a field that makes no sense beside a constraint.
    """
    for name, asked, why in (
        ("min_tokens", bool(fields.min_tokens), NEVER_ENDS),
        ("ignore_eos", bool(fields.ignore_eos), NEVER_ENDS),
        ("allowed_token_ids", fields.allowed_token_ids is not None, "both say what may be said"),
        ("max_tokens", fields.max_tokens == 0, "nothing would be said"),
    ):
        if asked:
            raise bad_request(f"'{name}' cannot be used beside '{constrained}': {why}", name)


MOST_NOTES = 32
_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
_FORMAT = re.compile(r"Unknown format: (.*)", re.DOTALL)
_PANIC = "panic:"  # of llguidance, about what it did not expect


def checked_notes(compiled: Compiled, constraint: Constraint) -> tuple[str, ...]:
    """What the grammar of a constraint leaves to the model, a sentence each.

    Raises:
        RefusedGrammarError: 400 naming the constraint's field where it is no grammar.
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


def _refusal(error: str, constraint: Constraint) -> RefusedGrammarError:
    field = constraint.field
    unheld = next(_unheld(error, constraint.schemas), None)
    if unheld is not None:
        return RefusedGrammarError(f"'{field}': {not_held(unheld)}", field)
    if error.startswith(_PANIC):
        error = "it cannot be compiled"
    elif "recursion limit exceeded" in error:
        error = "it is nested too deeply"
    return RefusedGrammarError(f"'{field}': {_line(error)}", field, error.startswith(TOO_MUCH))


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
