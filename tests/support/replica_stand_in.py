"""What stands behind an ingress under test: a replica that answers, streams, and can be killed."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

left = threading.Event()


class ReplicaStandIn(BaseHTTPRequestHandler):
    """Tells the headers it was sent and its own process (to GET, and to POST of ``/answer``), or
    begins a stream with the latter, says nothing more and listens to who asks; ``left`` is set once
    that one has gone."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._tell()

    def _tell(self) -> None:
        told: dict[str, object] = {name.lower(): value for name, value in self.headers.items()}
        body = json.dumps(told | {"process": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/answer":
            self._tell()
            return
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            process = f"{os.getpid():08d}".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(process), process))
        try:
            gone = self.connection.recv(1) == b""
        except OSError:
            gone = True
        if gone:
            left.set()
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def main() -> None:
    """Serves until it is killed; prints its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ReplicaStandIn)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
