"""Hostile requests, each drawn from a seeded chance of its own: bodies that are no JSON or not what
a route takes, what is large or asks for a lot of work in few bytes, and what is hostile as HTTP.

Whatever is accepted is short: a request that may say as much as it likes is made to end at once,
so that one that takes long is one that hangs. Short texts and values are in ``data/hostile.json``.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lexshard.cluster.ingress import LARGEST_BODY
from lexshard.serve_app.openai.chat_fields import ChatCompletionRequest, TokenizeChatRequest
from lexshard.serve_app.openai.protocol import (
    CompletionRequest,
    DetokenizeRequest,
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
# The server's limits: for all of a request's headers, for a body, and how long it goes on reading
# one that is too large.
HEADER_SECONDS, BODY_SECONDS, DRAINING_SECONDS = 10.0, 60.0, 10.0
# What a client may expect: an answer; an answer or at least the end of the connection; nothing,
# because it leaves before.
ANSWER, END, LEAVES = "answer", "end", "leaves"
LETTERS = ("a", " ", "\n", "1", "ab ", "word ", "\u00e9", "\u4e16", "\U0001f4a5", "e\u0301", "\x00")

_DATA: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "hostile.json").read_text(encoding="utf-8")
)
# What would be a long line there: texts, whose characters are bytes where they are sent as such,
# values of any field, and values of fields of sampling.
_LONG: dict[str, tuple[Any, ...]] = {
    "paths": ("/v1/models/" + "x" * 5000, "/health?x=" + "y" * 900),
    "headers": (
        *("X-Request-Id: " + "x" * 4000, "Authorization: " + "a" * 5000),
        *("Cookie: " + "a=b; " * 500, "X-Long: " + "y" * 7000),
    ),
    "huge headers": (
        *("X-Huge: " + "y" * 100_000, "X-Huge: " + "y" * 1_000_000),
        *("\r\n".join(f"X-{index}: 1" for index in range(count)) for count in (150, 20_000)),
    ),
    "broken chunks": ("2;" + "x" * 5000 + "\r\n{}\r\n0\r\n\r\n",),
    "numbers": ("1" + "0" * 100_000, "0." + "0" * 100_000 + "1"),
    "unknown fields": ("x" * 10_000,),
    "bad bytes": ("\xe2\x80\xae\xe2\x80\x8d" * 200, "e\xcc\x81" * 500),
    "values": (
        *("\U0001f4a5" * 50, "x" * 5000, ["a"] * 2000, [0] * 3000),
        {str(index): index for index in range(1500)},
    ),
}
_LONG_SAMPLING: dict[str, list[Any]] = {
    "logit_bias": [dict.fromkeys(map(str, range(1024)), -100), dict.fromkeys(range(1025), 100)],
    "allowed_token_ids": [list(range(16_384)), [0] * 5000],
    "bad_words": [["a"] * 1024, ["a" * 1024], ["x" * 1024] * 16],
    "stop": ["x" * 1024, "x" * 1025],
    "stop_token_ids": [[16_383] * 1024, list(range(1024))],
}
WORDS = {kind: (*_DATA.get(kind, ()), *_LONG.get(kind, ())) for kind in {**_DATA, **_LONG}}
SAMPLING = {name: ends + _LONG_SAMPLING.get(name, []) for name, ends in _DATA["sampling"].items()}


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """Bytes to send, in pieces with ``gap`` seconds between them, and what is expected within
    ``patience`` seconds of the first one."""

    pieces: tuple[bytes, ...]
    method: str = "POST"
    patience: float = SMALL_SECONDS
    expects: str = ANSWER
    gap: float = 0.0

    def begins(self) -> str:
        """Enough of it to be recognised."""
        head, _, body = b"".join(self.pieces[:3])[:100_000].partition(b"\r\n\r\n")
        line, size = head.partition(b"\r\n")[0], sum(map(len, self.pieces))
        return f"{line[:60]!r} {body[:60]!r}, {size:,} bytes"


def _raw(chance: random.Random, kind: str) -> bytes:
    return bytes(chance.choice(WORDS[kind]).encode("latin-1"))


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


def _drawn(chance: random.Random, paths: tuple[str, ...] = ROUTES) -> tuple[str, dict[str, Any]]:
    """A path, and a valid body for it."""
    path = chance.choice(paths)
    return path, valid_body(chance, path)


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


def _with_text(
    chance: random.Random, path: str, shape: Any, text: bytes, fields: tuple[str, ...] = ()
) -> HostileRequest:
    """A valid body but for one field, which is ``shape`` with ``text`` in the place of every
    ``"@"``, which the text replaces with their quotes."""
    body = valid_body(chance, path)
    body[chance.choice(fields or FIELDS[path])] = shape
    if path in GENERATING:
        _end_soon(body)
    return post(path, json.dumps(body).encode().replace(b'"@"', text))


# -- bodies ---------------------------------------------------------------------------------------


def hostile_value(chance: random.Random) -> Any:
    """A value of some type, hardly ever the right one."""
    nested: Any = "deep"
    for _ in range(chance.choice((1, 5, 50))):
        nested = [nested] if chance.random() < 0.5 else {"a": nested}
    return chance.choice((*WORDS["values"], nested))


def wrong_types(chance: random.Random) -> HostileRequest:
    path, body = _drawn(chance)
    for _ in range(chance.choice((1, 1, 1, 3))):
        body[chance.choice(FIELDS[path])] = hostile_value(chance)
    return encoded(chance, path, body)


def odd_numbers(chance: random.Random) -> HostileRequest:
    """Numbers as JSON has and does not have them, in every field."""
    shape = chance.choice(("@", ["@"], ["@", 1], {"0": "@"}))
    return _with_text(chance, chance.choice(ROUTES), shape, _raw(chance, "numbers"))


def nesting(chance: random.Random) -> HostileRequest:
    path = chance.choice(ROUTES)
    depth = chance.choice((10, 100, 500, 1000, 1024, 1025, 5000, 100_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ('[{"b":[', "]}]")))
    whole = opening * depth + "1" + closing * (depth if chance.random() < 0.7 else 0)
    if chance.random() < 0.05:
        return post(path, whole.encode())
    return _with_text(chance, path, "@", whole.encode())


def broken_json(chance: random.Random) -> HostileRequest:
    path, body = _drawn(chance)
    text = json.dumps(body)
    place = chance.randrange(1, len(text))
    inserted = text[:place] + chance.choice(string.printable) + text[place:]
    changed = (
        *(text[:place], text[:place] + text[place + 1 :], inserted, text + text),
        *(text[:-1] + ",}", text.replace('"', "'"), text + "// comment", text + "\x00" * 10),
        *("\ufeff" + text, text.replace("2", "undefined"), text.replace(" ", "\n\t\r\x0b")),
        *("data: " + text, "a=1&prompt=b", '{"prompt":"a",' * 3 + '"max_tokens":1}'),
        '{"prompt": "a", "prompt": "b", "max_tokens": 1, "max_tokens": 2}',
    )
    other = text.encode(chance.choice(("utf-16", "utf-32", "utf-7", "cp037")))
    noise = chance.randbytes(chance.randrange(1, 500))
    return post(path, chance.choice((*(each.encode() for each in changed), other, noise)))


def broken_utf8(chance: random.Random) -> HostileRequest:
    shape = chance.choice(("@", ["@"], {"@": "@"}, [{"role": "user", "content": "@"}]))
    text = b'"' + _raw(chance, "bad bytes") + b'"'
    return _with_text(chance, chance.choice(ROUTES), shape, text)


def unknown_fields(chance: random.Random) -> HostileRequest:
    path, body = _drawn(chance)
    for _ in range(chance.choice((1, 1, 5, 100))):
        name = chance.choice(WORDS["unknown fields"])
        body[name + str(len(body)) * (len(body) > 5)] = hostile_value(chance)
    return encoded(chance, path, body)


def empty(chance: random.Random) -> HostileRequest:
    path, body = _drawn(chance)
    if chance.random() < 0.5:
        return post(path, _raw(chance, "empty bodies"))
    body[chance.choice(FIELDS[path])] = chance.choice(WORDS["nothing"])
    return encoded(chance, path, body)


def control_characters(chance: random.Random) -> HostileRequest:
    path, body = _drawn(chance)
    odd = "".join(chr(chance.choice((*range(32), 127, 0x85, 0x2028, 0xFEFF))) for _ in range(20))
    fields = ("prompt", "stop", "bad_words", "request_id", "model", "user", "messages", odd)
    name = chance.choice(fields)
    body[name] = chance.choice((odd, [odd], [{"role": odd, "content": odd}], {odd: odd}))
    if name == "messages":
        body[name] = [{"role": "user", "content": odd, "name": odd}]
    return encoded(chance, path, body)


def odd_sampling(chance: random.Random) -> HostileRequest:
    """Fields of the right types with values at and beyond their ends, several at a time."""
    path, body = _drawn(chance, GENERATING)
    for name in chance.sample(sorted(SAMPLING), chance.randrange(1, 6)):
        body[name] = chance.choice(SAMPLING[name])
    return encoded(chance, path, body)


def odd_conversations(chance: random.Random) -> HostileRequest:
    """Messages and template arguments as no client sends them."""
    path = chance.choice((CHAT, TOKENIZE))
    odd = chance.random() < 0.6  # else only the contents are
    roles, contents = (WORDS["roles"], "contents") if odd else (("user",), "proper contents")
    messages = [
        {"role": chance.choice(roles), "content": chance.choice(WORDS[contents])}
        for _ in range(chance.choice((1, 2, 5, 1000)))
    ]
    if chance.random() < 0.3:
        messages[0][chance.choice(WORDS["message fields"])] = [1]
    body: dict[str, Any] = {"messages": messages}
    if path == CHAT:
        body["max_tokens"] = 2
    body["chat_template_kwargs"] = {
        chance.choice(WORDS["template names"]): chance.choice(WORDS["template values"])
        for _ in range(chance.choice((0, 1, 3)))
    }
    for name in ("add_generation_prompt", "continue_final_message"):
        if chance.random() < 0.3:
            body[name] = chance.random() < 0.5
    return encoded(chance, path, body)


# -- large ----------------------------------------------------------------------------------------


def many_keys(chance: random.Random) -> HostileRequest:
    """An object with up to a million keys, as the body or in it."""
    path, body = _drawn(chance)
    count = chance.choice((10_000, 200_000, 1_000_000))
    where = chance.choice(("", "logit_bias", "metadata", "chat_template_kwargs", "prompt"))
    letter = "" if where == "logit_bias" else "k"
    keys = ",".join(f'"{letter}{index}":1' for index in range(count))
    if where:
        made = _with_text(chance, path, "@", f"{{{keys}}}".encode(), (where,))
    else:
        made = post(path, (json.dumps(body)[:-1] + "," + keys + "}").encode())
    return replace(made, patience=LARGE_SECONDS)


def giant_prompts(chance: random.Random) -> HostileRequest:
    """Megabytes of text or ids, to be cut to what fits or not."""
    path, body = _drawn(chance, (COMPLETIONS, COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE))
    size = chance.choice((100_000, 1_000_000, 5_000_000, 15_000_000))
    letters = chance.choice(LETTERS)
    text = letters * (size // len(json.dumps(letters)[1:-1]))
    kind = chance.choice(("text", "text", "ids", "texts"))
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    elif path == DETOKENIZE:
        body["tokens"] = [chance.randrange(16_000)] * (size // 7)
    elif path == COMPLETIONS and kind == "ids":
        body["prompt"] = [chance.randrange(16_000)] * (size // 7)
    elif path == COMPLETIONS and kind == "texts":
        body["prompt"] = [text[: size // 200]] * 200
    else:
        body["prompt"] = text
    if path in GENERATING and (keep := chance.choice((None, -1, 1, 100, 2000))) is not None:
        body["truncate_prompt_tokens"] = keep
    return replace(encoded(chance, path, body), patience=LARGE_SECONDS)


def large_bodies(chance: random.Random) -> HostileRequest:
    """Bodies beyond the limit, announced or not, or only announced."""
    kind = chance.choice(("announced", "only announced", "chunked"))
    if kind == "announced":
        return post(COMPLETIONS, b" " * (LARGEST_BODY + chance.randrange(1, 10_000_000)))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n".encode()
    if kind == "only announced":
        length = LARGEST_BODY + chance.choice((1, 10**9, 10**15, 10**18))
        limit = DRAINING_SECONDS + SMALL_SECONDS
        return HostileRequest((head + b"Content-Length: %d\r\n\r\n" % length, b"{"), patience=limit)
    chunks = [b"100000\r\n" + b" " * 0x100000 + b"\r\n"] * 18
    start = head + b"Transfer-Encoding: chunked\r\n\r\n"
    return HostileRequest((start, *chunks, b"0\r\n\r\n"), patience=LARGE_SECONDS)


# -- as HTTP --------------------------------------------------------------------------------------


def methods_and_paths(chance: random.Random) -> HostileRequest:
    method, path = chance.choice(WORDS["methods"]), chance.choice(WORDS["paths"])
    body = json.dumps(valid_body(chance, COMPLETIONS)) if chance.random() < 0.3 else ""
    lines = [f"{method} {path} HTTP/1.1", "Host: chaos", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "Connection: close", "", body])
    return HostileRequest((head.encode("latin-1"),), method, SMALL_SECONDS)


def odd_headers(chance: random.Random) -> HostileRequest:
    """Headers that mean something to a program on the way, or are too many or too long."""
    path, body = _drawn(chance)
    data = json.dumps(body).encode()
    if chance.random() < 0.15:
        return replace(post(path, data, (chance.choice(WORDS["huge headers"]),)), expects=END)
    return post(path, data, tuple(chance.sample(WORDS["headers"], chance.randrange(1, 5))))


def broken_http(chance: random.Random) -> HostileRequest:
    """What is no HTTP, or HTTP that two readers may read differently."""
    kind = chance.randrange(4)
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: chaos\r\n".encode()
    if kind == 0:
        whole = _raw(chance, "broken HTTP")
    elif kind == 1:
        whole = start + _raw(chance, "broken frames") + b"\r\n\r\n{}\r\n0\r\n\r\n"
    elif kind == 2:
        whole = start + b"Transfer-Encoding: chunked\r\n\r\n" + _raw(chance, "broken chunks")
    else:
        whole = chance.randbytes(chance.randrange(1, 300)) + b"\r\n\r\n"
    # What looks unfinished may be waited for as long as headers may take.
    return HostileRequest((whole,), patience=HEADER_SECONDS + SMALL_SECONDS, expects=END)


def _pieces(chance: random.Random) -> tuple[bytes, bytes]:
    """Head and body of a valid request."""
    path, body = _drawn(chance)
    head, data = post(path, json.dumps(body).encode()).pieces
    return head, data


def halves(chance: random.Random) -> HostileRequest:
    """Headers that never end, which must be ended, and bodies that never do, whose clients leave
    in the end."""
    head, body = _pieces(chance)
    begun = head[: chance.randrange(1, len(head) - 4)]
    chunked = head.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX-Was: ")
    trailer = b"%x\r\n%s\r\n0\r\nX: " % (len(body), body) + b"y" * 9000
    drops = [tuple(part[index : index + 1] for index in range(len(part))) for part in (begun, body)]
    to_be_ended = HostileRequest((begun,), patience=HEADER_SECONDS + SMALL_SECONDS, expects=END)
    left = HostileRequest((), patience=3.0, expects=LEAVES)
    return chance.choice(
        (
            to_be_ended,
            replace(to_be_ended, pieces=drops[0], gap=0.5),
            replace(left, pieces=(head, body[: len(body) // 2])),
            replace(left, pieces=(chunked, trailer)),
            replace(left, pieces=(head, *drops[1][:-1]), gap=0.2),
            replace(left, pieces=(begun,), patience=chance.random()),
        )
    )


def stopping_bodies(chance: random.Random) -> HostileRequest:
    """Half a body and nothing more."""
    head, body = _pieces(chance)
    return HostileRequest((head, body[:-1]), patience=BODY_SECONDS + SMALL_SECONDS)


def leaving(chance: random.Random) -> HostileRequest:
    """Whole requests for long answers whose clients go at once or soon."""
    path, body = _drawn(chance)
    if "seed" in body:
        body |= {"max_tokens": 1000, "ignore_eos": True, "stream": chance.random() < 0.5}
    request = post(path, json.dumps(body).encode())
    return replace(request, patience=chance.choice((0.001, 0.02, 0.2)), expects=LEAVES)


# -- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FuzzKind:
    """A class of requests: how one is made, how many there are in full and with ``--quick``, and
    how many are sent at once."""

    make: Callable[[random.Random], HostileRequest]
    count: int
    quick: int
    at_once: int = 8


KINDS = {
    "wrong types": FuzzKind(wrong_types, 900, 80),
    "odd numbers": FuzzKind(odd_numbers, 500, 50),
    "nesting": FuzzKind(nesting, 300, 25),
    "broken JSON": FuzzKind(broken_json, 500, 50),
    "broken UTF-8": FuzzKind(broken_utf8, 400, 40),
    "unknown fields": FuzzKind(unknown_fields, 300, 25),
    "empty": FuzzKind(empty, 150, 40),
    "control characters": FuzzKind(control_characters, 300, 40),
    "odd sampling": FuzzKind(odd_sampling, 400, 40),
    "odd conversations": FuzzKind(odd_conversations, 300, 25),
    "methods and paths": FuzzKind(methods_and_paths, 300, 60),
    "odd headers": FuzzKind(odd_headers, 250, 50),
    "broken HTTP": FuzzKind(broken_http, 300, 40),
    "half-sent": FuzzKind(halves, 100, 30, at_once=50),
    "bodies that stop": FuzzKind(stopping_bodies, 20, 0, at_once=20),
    "clients that leave": FuzzKind(leaving, 150, 30),
    "many keys": FuzzKind(many_keys, 30, 8, at_once=1),
    "giant prompts": FuzzKind(giant_prompts, 40, 8, at_once=1),
    "large bodies": FuzzKind(large_bodies, 15, 5, at_once=1),
}


def hostile_request(kind: str, seed: int, number: int) -> HostileRequest:
    """The same for the same arguments."""
    return KINDS[kind].make(random.Random(f"{kind} {number} of {seed}"))
