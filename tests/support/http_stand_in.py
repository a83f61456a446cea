"""HTTP servers of tests: what all that stand for others have in common."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandInHandler(BaseHTTPRequestHandler):
    """One connection; ``answer`` is asked for every request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def content(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers["Content-Length"]))

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def say(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """A whole answer; one to HEAD is without its body."""
        self.head(status, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address of a server on this machine; without a ``port`` it has one that is free."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        with suppress(OSError):
            server.server_close()
        thread.join()
