"""HAProxy in front of the API processes of one machine, with a configuration all our own.

It is there for what an application in Python cannot do for less: it lets no client keep a
connection with half a request, waits for bodies, ends HTTPS, divides requests among API processes,
and has another one answer what a dead one took with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lexshard.cluster.ingress import (
    CONNECT_MILLISECONDS,
    ERROR_STATUSES,
    HEADER_SECONDS,
    IDLE_SECONDS,
    WAIT_FOR_BODY,
    connections_that_fit,
    listening_at,
    write_error_pages,
)
from lexshard.cluster.process_tree import die_with_parent

# A request that an API process has taken with it goes to the others, or to its successor.
RETRIES = 3


def write_configuration(
    folder: Path, host: str, port: int, sockets: Sequence[str], certificate: bytes | None = None
) -> Path:
    """What HAProxy reads to stand at ``host`` and ``port`` before API processes that listen at
    ``sockets``, files in ``folder``, which is the server's own; with a ``certificate`` and its key
    (PEM, one after the other) it speaks HTTPS."""
    write_error_pages(folder)
    listen = listening_at(folder, host, port, certificate)
    servers = (f"    server api{number} unix@{path}" for number, path in enumerate(sockets))
    lines = [
        "global",
        f"    maxconn {connections_that_fit()}",
        f"    nbthread {1 if (os.cpu_count() or 1) < 8 else 2}",
        "    noreuseport",  # with it a second server starts here, and has every other connection
        "defaults",
        "    mode http",
        f"    timeout connect {CONNECT_MILLISECONDS}ms",
        f"    timeout client {IDLE_SECONDS}s",
        f"    timeout server {IDLE_SECONDS}s",
        f"    timeout http-request {HEADER_SECONDS}s",
        "    option abortonclose",
        "    option http-no-delay",
        *(f"    errorfile {status} {folder}/{status}.http" for status in ERROR_STATUSES),
        "frontend clients",
        f"    bind {listen}",
        "    http-request set-header x-forwarded-for %[src]",
        "    http-request del-header x-forwarded-proto",
        "    default_backend api",
        "backend api",
        "    balance leastconn",
        # A pooled connection whose process dies just now would take a new request with it.
        "    http-reuse never",
        WAIT_FOR_BODY,
        "    retry-on conn-failure empty-response",
        f"    retries {RETRIES}",
        "    option redispatch 1",
        *servers,
    ]
    path = folder / "haproxy.cfg"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main(binary: str, configuration: str, parent: str) -> None:
    """Becomes HAProxy, which ends with the process ``parent``, that started this one."""
    die_with_parent(int(parent))
    os.execv(binary, [binary, "-db", "-f", configuration])


if __name__ == "__main__":
    main(*sys.argv[1:])
