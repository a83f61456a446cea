"""Hostile bodies for every POST route, each from a seeded chance of its own.

Whatever is accepted is short: a request that may say as much as it likes is made to end at once,
so that one that takes long is one that hangs.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

from lexshard.loadtest.chaos.hostile.exchange import HostileRequest
from lexshard.serve_app.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
FIELDS: dict[str, tuple[str, ...]] = {
    COMPLETIONS: tuple(CompletionRequest.model_fields),
    CHAT: tuple(ChatCompletionRequest.model_fields),
    TOKENIZE: (*TokenizeTextRequest.model_fields, *TokenizeChatRequest.model_fields),
    DETOKENIZE: tuple(DetokenizeRequest.model_fields),
}
ROUTES = tuple(FIELDS)
GENERATING = (COMPLETIONS, CHAT)
END_OF_TEXT = "0"  # the demo model's
MANY_TOKENS = 64
SMALL_BYTES = 1 << 20  # what is larger may take longer
SMALL_SECONDS, LARGE_SECONDS = 5.0, 30.0

NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "-0.0", "0.1e+", "1.0"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809"),
    *("00", "0x10", "1_000", "+1", ".5", "5.", "1e5", "1E400", "--1", "1.7976931348623159e308"),
    *("9" * 400, "-" + "9" * 400, "1" + "0" * 100_000, "0." + "0" * 100_000 + "1"),
)
UNKNOWN_FIELDS = (
    *("no_such_field", "", " ", " prompt", "PROMPT", "prompt\u0000", "__proto__", "__class__"),
    *("constructor", "prompt.text", "messages.0", "$ref", "x" * 10_000, "\U0001f4a5", "\u202eseed"),
    *("functions_", "stream ", "max_tokens\n", "extra_body", "guided_json", "use_beam_search"),
)
BAD_BYTES = (
    *(b"\xff", b"\xfe\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80" * 50),
    *(b"\xe2\x82", b"\xf0\x9f\x92", b"\\ud800", b"\\udfff\\ud800", b"\\ud83d", b"\\u00", b"\\x41"),
    *(b"\\u0000", b"\\uffff", b"\xef\xbf\xbf", "\u202e\u200d".encode() * 200),
    *("e\u0301".encode() * 500, b"\\u0001\\u001f", b"\xef\xbb\xbf", "\U0010ffff".encode() * 100),
)


def post(path: str, body: bytes, headers: tuple[str, ...] = ()) -> HostileRequest:
    """A whole request; what is small is to be answered sooner."""
    lines = [f"POST {path} HTTP/1.1", "Host: chaos", "Content-Type: application/json", *headers]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close", "", ""])
    patience = SMALL_SECONDS if len(body) < SMALL_BYTES else LARGE_SECONDS
    return HostileRequest((head.encode("latin-1"), body), patience=patience)


def valid_body(chance: random.Random, path: str) -> dict[str, Any]:
    """One that is answered with 200."""
    if path == DETOKENIZE:
        return {"tokens": [chance.randrange(1, 16_000) for _ in range(8)]}
    if path == TOKENIZE:
        return {"prompt": "Once upon a time"}
    body: dict[str, Any] = {"max_tokens": 2, "seed": chance.randrange(1000)}
    if path == CHAT:
        return body | {"messages": [{"role": "user", "content": "Hello!"}]}
    return body | {"prompt": "Once upon a time"}


def encoded(chance: random.Random, path: str, body: dict[str, Any]) -> HostileRequest:
    """The request with a body that is JSON (of Python's kind: it has NaN), and ends soon."""
    if path in GENERATING:
        _end_soon(body)
        if chance.random() < 0.3:
            body.setdefault("stream", True)
    return post(path, json.dumps(body).encode("utf-8", "surrogatepass"))


def _end_soon(body: dict[str, Any]) -> None:
    limits = [body.get("max_tokens"), body.get("max_completion_tokens")]
    if any(type(limit) is int and limit <= MANY_TOKENS for limit in limits):
        return
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
        body.pop(name, None)
    body["logit_bias"] = {END_OF_TEXT: 100}


def hostile_value(chance: random.Random) -> Any:
    """A value of some type, hardly ever the right one."""
    nested: Any = "deep"
    for _ in range(chance.choice((1, 5, 50))):
        nested = [nested] if chance.random() < 0.5 else {"a": nested}
    values: tuple[Any, ...] = (
        *(None, True, False, "", "a", "1", "null", 0, -1, 1, 1.5, -1e-300, 1e308, 3.0),
        *(2**31, 2**63, 2**64, -(2**63) - 1, 10**40, float("nan"), float("inf")),
        *([], {}, [[]], [{}], [None], [1.5], ["a", 1], {"a": {}}, {"": ""}, {"0": "x"}, nested),
        *("\x00", "\U0001f4a5" * 50, "x" * 5000, ["a"] * 2000, [0] * 3000, [-1], [2**31]),
        {str(index): index for index in range(1500)},
    )
    return chance.choice(values)


def wrong_types(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    body = valid_body(chance, path)
    for _ in range(chance.choice((1, 1, 1, 3))):
        body[chance.choice(FIELDS[path])] = hostile_value(chance)
    return encoded(chance, path, body)


def odd_numbers(chance: random.Random) -> HostileRequest:
    """Numbers as JSON has and does not have them, in every field."""
    path = chance.choice(ROUTES)
    body = valid_body(chance, path)
    shape = chance.choice(("@", ["@"], ["@", 1], {"0": "@"}))
    body[chance.choice(FIELDS[path])] = shape
    if path in GENERATING and shape == "@":
        _end_soon(body)
    text = json.dumps(body).replace('"@"', chance.choice(NUMBERS))
    return post(path, text.encode())


def nesting(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    depth = chance.choice((10, 100, 500, 1000, 1024, 1025, 5000, 100_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ('[{"b":[', "]}]")))
    whole = opening * depth + "1" + closing * (depth if chance.random() < 0.7 else 0)
    body = valid_body(chance, path)
    where = chance.choice(("", *FIELDS[path]))
    if not where:
        return post(path, whole.encode())
    body[where] = "@"
    if path in GENERATING:
        _end_soon(body)
    return post(path, json.dumps(body).replace('"@"', whole).encode())


def broken_json(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    text = json.dumps(valid_body(chance, path))
    place = chance.randrange(1, len(text))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: text[:place].encode(),
        lambda: (text[:place] + text[place + 1 :]).encode(),
        lambda: (text[:place] + chance.choice(string.printable) + text[place:]).encode(),
        lambda: (text + text).encode(),
        lambda: (text[:-1] + ",}").encode(),
        lambda: text.replace('"', "'").encode(),
        lambda: (text + "// comment").encode(),
        lambda: (text + "\x00" * 10).encode(),
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: text.encode(chance.choice(("utf-16", "utf-32", "utf-7", "cp037"))),
        lambda: text.replace("2", "undefined").encode(),
        lambda: text.replace(" ", "\n\t\r\x0b").encode(),
        lambda: b"data: " + text.encode(),
        lambda: b"a=1&prompt=b",
        lambda: chance.randbytes(chance.randrange(1, 500)),
        lambda: ('{"prompt":"a",' * 3 + '"max_tokens":1}').encode(),
        lambda: b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "max_tokens": 2}',
    )
    return post(path, chance.choice(changes)())


def broken_utf8(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    body = valid_body(chance, path)
    field = chance.choice(FIELDS[path])
    body[field] = chance.choice(("@", ["@"], {"@": "@"}, [{"role": "user", "content": "@"}]))
    if path in GENERATING:
        _end_soon(body)
    return post(path, json.dumps(body).encode().replace(b"@", chance.choice(BAD_BYTES)))


def unknown_fields(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    body = valid_body(chance, path)
    for _ in range(chance.choice((1, 1, 5, 100))):
        name = chance.choice(UNKNOWN_FIELDS)
        body[name + str(len(body)) * (len(body) > 5)] = hostile_value(chance)
    return encoded(chance, path, body)


def empty(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    if chance.random() < 0.5:
        return post(path, chance.choice((b"", b" ", b"\n", b"null", b'""', b"[]", b"{}", b"0")))
    body = valid_body(chance, path)
    nothing: Any = chance.choice((None, "", [], {}, [[]], [""], [{}], " ", "\n"))
    body[chance.choice(FIELDS[path])] = nothing
    return encoded(chance, path, body)


def control_characters(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    body = valid_body(chance, path)
    odd = "".join(chr(chance.choice((*range(32), 127, 0x85, 0x2028, 0xFEFF))) for _ in range(20))
    fields = ("prompt", "stop", "bad_words", "request_id", "model", "user", "messages", odd)
    name = chance.choice(fields)
    body[name] = chance.choice((odd, [odd], [{"role": odd, "content": odd}], {odd: odd}))
    if name == "messages":
        body[name] = [{"role": "user", "content": odd, "name": odd}]
    return encoded(chance, path, body)
