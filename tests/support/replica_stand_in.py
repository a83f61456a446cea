"""What stands behind an ingress under test: a replica that answers, streams, and can be killed."""

from __future__ import annotations

import json
import os
import signal
import threading

from tests.support.http_stand_in import StandInHandler, serving

left = threading.Event()


class ReplicaStandIn(StandInHandler):
    """Tells the headers it was sent and its own process (to GET, and to POST of ``/answer``), or
    begins a stream with the latter, says nothing more and listens to its client; ``left`` is set
    once that one has gone."""

    def answer(self) -> None:
        if self.command == "POST":
            self.content()
        if self.command == "POST" and self.path != "/answer":
            self.listen()
            return
        told: dict[str, object] = {name.lower(): value for name, value in self.headers.items()}
        self.say(200, json.dumps(told | {"process": os.getpid()}).encode())

    def listen(self) -> None:
        if self.path == "/stream":
            self.head(200, {"Transfer-Encoding": "chunked"})
            process = f"{os.getpid():08d}".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(process), process))
        try:
            gone = self.connection.recv(1) == b""
        except OSError:
            gone = True
        if gone:
            left.set()
        self.close_connection = True


if __name__ == "__main__":
    with serving(ReplicaStandIn) as url:
        print(url.rpartition(":")[2], flush=True)
        signal.pause()
