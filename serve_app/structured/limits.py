"""What a grammar may cost. Measured on one core of an AMD EPYC with 128,000 tokens."""

from __future__ import annotations

from typing import Final

from lexshard.serve_app.openai.errors import bad_request

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


def check_size(size: int, field: str) -> None:
    """Raises:
    ApiError: 400 naming ``field`` where it makes a grammar of more bytes than are compiled.
    """
    if size > MAX_TEXT_BYTES:
        raise bad_request(
            f"'{field}' makes a grammar of {size} bytes, more than {MAX_TEXT_BYTES}", field
        )
