"""Requests that are hostile as HTTP: methods, paths, headers, framing, and halves of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from lexshard.cluster.ingress import LARGEST_BODY
from lexshard.loadtest.chaos.hostile.bodies import (
    COMPLETIONS,
    LARGE_SECONDS,
    ROUTES,
    SMALL_SECONDS,
    post,
    valid_body,
)
from lexshard.loadtest.chaos.hostile.exchange import END, LEAVES, HostileRequest

# The server's limits: for all of a request's headers, for a body, and how long it goes on reading
# one that is too large.
HEADER_SECONDS, BODY_SECONDS, DRAINING_SECONDS = 10.0, 60.0, 10.0
PATHS = (
    *("/", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/v1//completions", "/V1/MODELS"),
    *("/v1/models", "/v1/models/", "/v1/models/none", "/v1/models/..%2f..%2fetc", "/v1/models/%00"),
    *("/v1/models/%ff%fe", "/v1/models/" + "x" * 5000, "/v1/embeddings", "/docs", "/openapi.json"),
    *(
        "/-/healthz",
        "/-/routes",
        "/%2d/routes",
        "/%2D/healthz",
        "/health/",
        "/health?x=" + "y" * 900,
    ),
    *("/metrics/", "/version", "/tokenizer_info", "/../../etc/passwd", "/.git/config", "*"),
    *("http://other.example/v1/models", "/v1/completions?max_tokens=1", "/v1/completions#x", "/%"),
    *("/v1/completions;a=b", "/\xff\xfe", "/v1/models/\xe4", "/v1/chat", "/favicon.ico"),
    *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health", "/metrics"),
)
METHODS = (
    *("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"),
    *("get", "FOO", "X" * 100),
)
ODD_HEADERS = (
    *("X-Request-Timeout-Seconds: 0", "X-Request-Timeout-Seconds: nan"),
    *("X-Request-Disconnect-Disabled: ?1", "serve_multiplexed_model_id: other"),
    *(
        "X-Request-Id: a b",
        "X-Request-Id: " + "x" * 4000,
        "X-Request-Id: \xff\xfe",
        "X-Request-Id:",
    ),
    *("Authorization: Bearer", "Authorization: Basic \xff", "Authorization: " + "a" * 5000),
    *("Content-Type: text/plain", "Content-Type: multipart/form-data", "Content-Type: \xff"),
    *(
        "Content-Encoding: gzip",
        "Content-Encoding: br",
        "Accept: nothing/at-all",
        "Accept-Encoding: x",
    ),
    *(
        "Expect: 100-continue",
        "Expect: 200-ok",
        "Upgrade: websocket",
        "Upgrade: h2c",
        "Range: bytes=1-",
    ),
    *("Host: other", "X-Forwarded-For: 1.2.3.4", "X-Forwarded-Proto: gopher", "Forwarded: for=_x"),
    *("Cookie: " + "a=b; " * 500, "Connection: keep-alive, upgrade", "Transfer-Encoding: identity"),
    *("X-Odd: \x01\x02", "X Odd: 1", "X-Odd : 1", ": nothing", "X-Empty:", "X-Long: " + "y" * 7000),
)
HUGE_HEADERS = (
    "X-Huge: " + "y" * 100_000,
    "X-Huge: " + "y" * 1_000_000,
    "\r\n".join(f"X-{index}: 1" for index in range(150)),
    "\r\n".join(f"X-{index}: 1" for index in range(20_000)),
)
BROKEN_HTTP = (
    *(b"\r\n\r\n\r\n", b"GET\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n"),
    *(
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
    ),
    *(b"GET  /health  HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.1\nHost: a\n\n"),
    b"GET /hea lth HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x07" * 300,
    b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00",
    b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.0\r\n",
)
BROKEN_FRAMES = (
    b"Content-Length: -1",
    b"Content-Length: abc",
    b"Content-Length: 1e3",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding : chunked",
)
BROKEN_CHUNKS = (
    *(b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n\r\n", b"ffffffffffffffffff\r\n{}", b"2\r\n{}5\r\n"),
    *(b"2;" + b"x" * 5000 + b"\r\n{}\r\n0\r\n\r\n", b"2\n{}\n0\n\n"),
)


def methods_and_paths(chance: random.Random) -> HostileRequest:
    method, path = chance.choice(METHODS), chance.choice(PATHS)
    body = json.dumps(valid_body(chance, COMPLETIONS)) if chance.random() < 0.3 else ""
    lines = [f"{method} {path} HTTP/1.1", "Host: chaos", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "Connection: close", "", body])
    return HostileRequest((head.encode("latin-1"),), method, SMALL_SECONDS)


def odd_headers(chance: random.Random) -> HostileRequest:
    """Headers that mean something to somebody on the way, or are too many or too long."""
    path = chance.choice(ROUTES)
    body = json.dumps(valid_body(chance, path)).encode()
    if chance.random() < 0.15:
        return replace(post(path, body, (chance.choice(HUGE_HEADERS),)), expects=END)
    return post(path, body, tuple(chance.sample(ODD_HEADERS, chance.randrange(1, 5))))


def large_bodies(chance: random.Random) -> HostileRequest:
    """Bodies beyond the limit, announced or not, or only announced."""
    kind = chance.choice(("announced", "only announced", "chunked"))
    if kind == "announced":
        return post(COMPLETIONS, b" " * (LARGEST_BODY + chance.randrange(1, 10_000_000)))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: chaos\r\nConnection: close\r\n"
    if kind == "only announced":
        length = LARGEST_BODY + chance.choice((1, 10**9, 10**15, 10**18))
        announced = f"Content-Length: {length}\r\n\r\n".encode()
        limit = DRAINING_SECONDS + SMALL_SECONDS
        return HostileRequest((head.encode() + announced, b"{"), patience=limit)
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    start = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    return HostileRequest((start, *[chunk] * 18, b"0\r\n\r\n"), patience=LARGE_SECONDS)


def broken_http(chance: random.Random) -> HostileRequest:
    """What is no HTTP, or HTTP that two readers may read differently."""
    kind = chance.randrange(4)
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: chaos\r\n".encode()
    if kind == 0:
        whole = chance.choice(BROKEN_HTTP)
    elif kind == 1:
        whole = start + chance.choice(BROKEN_FRAMES) + b"\r\n\r\n{}\r\n0\r\n\r\n"
    elif kind == 2:
        whole = start + b"Transfer-Encoding: chunked\r\n\r\n" + chance.choice(BROKEN_CHUNKS)
    else:
        whole = chance.randbytes(chance.randrange(1, 300)) + b"\r\n\r\n"
    # What looks unfinished may be waited for as long as headers may take.
    return HostileRequest((whole,), patience=HEADER_SECONDS + SMALL_SECONDS, expects=END)


def halves(chance: random.Random) -> HostileRequest:
    """Headers that never end, which must be ended, and bodies that never do, whose clients leave
    in the end."""
    path = chance.choice(ROUTES)
    head, body = post(path, json.dumps(valid_body(chance, path)).encode()).pieces
    place = chance.randrange(1, len(head) - 4)
    kind = chance.choice(
        ("headers", "dripping headers", "body", "dripping body", "trailer", "leaves")
    )
    limit = HEADER_SECONDS + SMALL_SECONDS
    if kind == "headers":
        return HostileRequest((head[:place],), patience=limit, expects=END)
    if kind == "dripping headers":
        drops = tuple(head[index : index + 1] for index in range(place))
        return HostileRequest(drops, patience=limit, expects=END, gap=0.5)
    if kind == "body":
        return HostileRequest((head, body[: len(body) // 2]), patience=3.0, expects=LEAVES)
    if kind == "trailer":
        chunked = head.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX-Was: ")
        rest = b"%x\r\n%s\r\n0\r\nX: " % (len(body), body)
        return HostileRequest((chunked, rest + b"y" * 9000), patience=3.0, expects=LEAVES)
    if kind == "dripping body":
        drops = tuple(body[index : index + 1] for index in range(len(body) - 1))
        return HostileRequest((head, *drops), patience=3.0, expects=LEAVES, gap=0.2)
    return HostileRequest((head[:place],), patience=chance.random(), expects=LEAVES)


def stopping_bodies(chance: random.Random) -> HostileRequest:
    """Half a body and nothing more."""
    path = chance.choice(ROUTES)
    head, body = post(path, json.dumps(valid_body(chance, path)).encode()).pieces
    return HostileRequest((head, body[:-1]), patience=BODY_SECONDS + SMALL_SECONDS)


def leaving(chance: random.Random) -> HostileRequest:
    """Whole requests for long answers whose clients go at once or soon."""
    path = chance.choice(ROUTES)
    body = valid_body(chance, path)
    if "seed" in body:
        body |= {"max_tokens": 1000, "ignore_eos": True, "stream": chance.random() < 0.5}
    request = post(path, json.dumps(body).encode())
    return replace(request, patience=chance.choice((0.001, 0.02, 0.2)), expects=LEAVES)
