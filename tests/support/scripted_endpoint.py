"""A tiny OpenAI endpoint without an engine: streams words at a given pace, or fails as told.

As a process of its own, until it is ended: ``python -m tests.support.scripted_endpoint PORT``.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_PER_WORD = 2.0
TEMPLATE_TOKENS = 7  # what a chat template adds
MODEL = "scripted"


@dataclass
class EndpointScript:
    """How every request is answered; every ``fault_every``-th streamed one with ``fault``: status,
    unfinished, undone, error event or cut."""

    first_seconds: float = 0.01
    gap_seconds: float = 0.002
    fault: str = ""
    fault_every: int = 2
    max_model_len: int | None = None
    streamed: list[dict[str, Any]] = field(default_factory=list)  # bodies
    cancelled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def scripted_endpoint(script: EndpointScript, port: int = 0) -> Iterator[str]:
    """Its address; without a ``port`` it has one that is free."""

    class _Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            model = {"id": MODEL, "max_model_len": script.max_model_len}
            self._whole(200, {"data": [model]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not body.get("stream"):
                self._whole(200, {"choices": [], "usage": _usage(body)})
                return
            with script.lock:
                script.streamed.append(body)
                fault = script.fault if len(script.streamed) % script.fault_every == 0 else ""
            if fault == "status":
                self._whole(503, {"error": {"message": "full", "type": "overloaded"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                self._stream(body, fault)
            except OSError:
                with script.lock:
                    script.cancelled += 1
                self.close_connection = True

        def _stream(self, body: dict[str, Any], fault: str) -> None:
            chat = "messages" in body
            if chat:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            count = body["max_tokens"]
            for index in range(count):
                time.sleep(script.gap_seconds if index else script.first_seconds)
                if fault and index == count // 2:
                    if fault == "cut":
                        self.close_connection = True
                        return
                    if fault == "error event":
                        self._event({"error": {"message": "the engine died"}})
                        self._chunk(b"data: [DONE]\n\n")
                        self._chunk(b"")
                        return
                last = index == count - 1 and fault != "unfinished"
                said = {"delta": {"content": "a "}} if chat else {"text": "a "}
                self._event({"choices": [{**said, "finish_reason": "length" if last else None}]})
            self._event({"choices": [], "usage": _usage(body)})
            if fault != "undone":
                self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, fields: dict[str, Any]) -> None:
            self._chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _whole(self, status: int, fields: dict[str, Any]) -> None:
            content = json.dumps(fields).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Tests print enough."""

    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
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


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][0]["content"])


def _usage(body: dict[str, Any]) -> dict[str, int]:
    words = len(prompt_of(body).split())
    template = TEMPLATE_TOKENS if "messages" in body else 0
    tokens = round(TOKENS_PER_WORD * words) + template
    return {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}


if __name__ == "__main__":
    with scripted_endpoint(EndpointScript(), int(sys.argv[1])):
        print("listening", flush=True)
        signal.pause()
