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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_stand_in import StandInHandler, serving

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

    class Handler(StandInHandler):
        def answer(self) -> None:
            if self.command == "GET":
                model = {"id": MODEL, "max_model_len": script.max_model_len}
                self._whole(200, {"data": [model]})
                return
            body = json.loads(self.content())
            if not body.get("stream"):
                self._whole(200, {"choices": [], "usage": _usage(body)})
                return
            with script.lock:
                script.streamed.append(body)
                fault = script.fault if len(script.streamed) % script.fault_every == 0 else ""
            if fault == "status":
                self._whole(503, {"error": {"message": "full", "type": "overloaded"}})
                return
            self.head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
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
            self.say(status, json.dumps(fields).encode(), {"Content-Type": "application/json"})

    with serving(Handler, port) as url:
        yield url


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
