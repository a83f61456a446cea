"""From the bytes of a body to what its JSON holds: bounded before anything is made of it, and with
one meaning."""

from __future__ import annotations

import json
from typing import Any

import orjson

from lexshard.serve_app.openai.errors import bad_request, shortened

# Of a whole body, at every depth: values take up to 24 times the memory of their JSON, and names
# ten times the time of numbers.
MAX_JSON_VALUES = 1_000_000
MAX_JSON_NAMES = 100_000
NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{,:'))
PIECE_BYTES = 1 << 20


def decoded(body: bytes) -> Any:
    """What a JSON body holds.

    Raises:
        ApiError: 400 for one that is no JSON, holds too much or a name twice: of that parsers keep
            one or the other, and what a proxy has checked would not be what is done.
    """
    if len(body) > MAX_JSON_NAMES and _holds_too_much(body):
        raise bad_request(
            f"the body holds more than {MAX_JSON_VALUES} values or {MAX_JSON_NAMES} names"
        )
    try:
        value = orjson.loads(body)
        again = orjson.dumps(value)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    except orjson.JSONEncodeError as error:
        raise bad_request("the body is nested too deeply") from error
    # A name that was given twice is missing there, and so is its colon. Only an escaped colon may
    # make up for it.
    if body.count(b":") != again.count(b":") or b"\\u003" in body:
        json.loads(body, object_pairs_hook=_names_once)
    return value


def _names_once(pairs: list[tuple[str, Any]]) -> None:
    """Raises:
    ApiError: 400 for a name that comes twice.
    """
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            name = shortened(name)
            raise bad_request(f"the body has '{name}' twice in one object", name)
        seen.add(name)


def _holds_too_much(body: bytes) -> bool:
    """Counts what comes before values (brackets, braces and commas) and after names (colons)."""
    values = sum(map(body.count, (b"[", b"{", b",")))
    if values <= MAX_JSON_VALUES and body.count(b":") <= MAX_JSON_NAMES:
        return False  # even with those inside strings
    # Once escapes are gone, every quote begins or ends a string; two side by side change nothing.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    rest = rest.translate(None, NO_STRUCTURE).replace(b'""', b"")
    values = names = inside = 0
    for begin in range(0, len(rest), PIECE_BYTES):
        parts = rest[begin : begin + PIECE_BYTES].split(b'"')
        outside = b"".join(parts[inside::2])
        names += outside.count(b":")
        values += len(outside) - outside.count(b":")
        if values > MAX_JSON_VALUES or names > MAX_JSON_NAMES:
            return True
        inside ^= (len(parts) - 1) % 2
    return False
