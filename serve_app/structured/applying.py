"""From the fields of a request to a constraint that is known to compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lexshard.actors.configuration import EngineInformation
from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.openai.protocol import GenerationFields
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.openai.workers import SHORT_TEXT, Receive
from lexshard.serve_app.structured.compiling import GrammarCompiler
from lexshard.serve_app.structured.constraint import Constraint
from lexshard.serve_app.structured.explaining import checked_notes
from lexshard.serve_app.structured.fields import ConstraintFields
from lexshard.serve_app.structured.reading import read_constraint

# A whole reply, from what its answer must match.
Around = Callable[[Constraint | None], Constraint | None]
NEVER_ENDS = "what a reply must match says where it ends"


async def constraint_of(
    fields: GenerationFields,
    around: Around | None,
    tokenizer: ModelTokenizer,
    compiler: GrammarCompiler,
    information: EngineInformation,
    receive: Receive,
) -> Constraint | None:
    """What the output of a request must match, compiled, with what was left to the model.
    ``around`` makes a grammar of the whole output from that of the answer in it.

    Raises:
        ApiError: 400 naming the field that asks for what is no constraint, or that none can stand
            beside; 503 where too many grammars wait.
        ClientDisconnectedError: the client left.
    """
    constraint = None
    if asks_for_constraint(fields):
        specials = tokenizer.special_tokens()

        def read() -> Constraint | None:
            return read_constraint(fields, specials)

        constraint = await tokenizer.workers.run(SHORT_TEXT + 1, read, receive)
    if around is not None:
        constraint = around(constraint)
    if constraint is None:
        return None
    _check_beside(fields, constraint.field)
    compiled = await compiler.compiled(constraint.text(), constraint.field, information, receive)
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
