"""Prompts that begin alike go to one replica, whose prefix cache has their blocks, unless it has
too much to do."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lexshard.cluster.ingress import haproxy_binary
from tests.support.real_ingress import OpenStream, ask, post, replicas_to_kill, running_ingress

pytestmark = pytest.mark.skipif(
    haproxy_binary() is None, reason="no HAProxy comes with Ray Serve here"
)


def answered_by(port: int, body: dict[str, Any] | bytes) -> int:
    """The process of the replica that ``body`` went to."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = ask(port, post("/answer", raw, "Connection: close"))
    assert status == "HTTP/1.1 200 OK"
    return int(json.loads(answer)["process"])


def chat(*texts: str, **others: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": "x", "messages": messages, **others}


def beginnings() -> dict[str, list[dict[str, Any]]]:
    """Requests by what they begin with, which is all that each group has in common."""
    text = "Once upon a time there was a girl who had 17 cats. " * 24
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": "x"}]
    return {
        "a prompt": [
            {"model": "x", "prompt": text + end, "seed": seed}
            for seed, end in enumerate(("", "Then", 'She said "no".'))
        ],
        "token ids": [{"prompt": [*range(400), *end]} for end in ((), (1,), (1, 2, 3))],
        "a conversation": [
            chat("Be brief.", "Who are you?"),
            chat("Be brief.", "Who are you?", "Nobody.", "Why?", temperature=0.5),
        ],
        "parts of a message": [
            {"messages": [{"role": "user", "content": parts}], "max_tokens": n} for n in (1, 2)
        ],
        "a prompt longer than a buffer": [
            {"model": "x", "prompt": text * 40 + end} for end in ("", "Then")
        ],
    }


def test_what_begins_alike_goes_to_one_replica(tmp_path: Path) -> None:
    with replicas_to_kill(4) as replicas, running_ingress(tmp_path, list(replicas), "prefix") as to:
        for what, requests in beginnings().items():
            found = {answered_by(to, request) for request in requests for _ in range(3)}
            assert len(found) == 1, what


def test_what_begins_otherwise_is_shared_out(tmp_path: Path) -> None:
    """Conversations with the same system prompt, too."""
    with replicas_to_kill(4) as replicas, running_ingress(tmp_path, list(replicas), "prefix") as to:
        prompts = Counter(answered_by(to, {"prompt": f"{n} little pigs"}) for n in range(80))
        talks = Counter(answered_by(to, chat("Be kind.", f"Hello {n}")) for n in range(80))
        for counts in (prompts, talks):
            assert len(counts) == 4
            assert max(counts.values()) < 50


def test_bodies_that_say_no_prompt_are_answered(tmp_path: Path) -> None:
    """Whatever is wrong with them is the application's to say."""
    bodies = [
        b"",
        b"{",
        b"null",
        b"[1, 2",
        b'{"prompt": null}',
        b'{"messages": 3}',
        b"\xff\x00" * 99,
    ]
    with replicas_to_kill(2) as replicas, running_ingress(tmp_path, list(replicas), "prefix") as to:
        for body in bodies:
            assert answered_by(to, body) in {each.pid for each in replicas.values()}
        status, _ = ask(to, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status == "HTTP/1.1 200 OK"


def test_a_replica_with_too_many_shares_them(tmp_path: Path) -> None:
    """One beginning for all: none has more than half as many again as the average of the four."""
    body = json.dumps({"prompt": "The same for everybody"}).encode()
    with replicas_to_kill(4) as replicas, running_ingress(tmp_path, list(replicas), "prefix") as to:
        streams = [OpenStream(to, body) for _ in range(24)]
        counts = Counter(stream.process for stream in streams)
        assert len(counts) >= 3
        assert max(counts.values()) <= 9 + 1


def test_where_a_replica_dies_its_beginnings_go_to_another(tmp_path: Path) -> None:
    with replicas_to_kill(3) as replicas, running_ingress(tmp_path, list(replicas), "prefix") as to:
        requests = [{"prompt": f"{n} little pigs"} for n in range(30)]
        before = [answered_by(to, request) for request in requests]
        victim = next(iter(replicas.values()))
        victim.kill()
        for request, replica in zip(requests, before, strict=True):
            found = answered_by(to, request)
            assert found == replica if replica != victim.pid else found != victim.pid


def test_a_request_that_its_replica_took_with_it_is_answered_by_another(tmp_path: Path) -> None:
    """What it begins with leads to the dead one once more, which refuses it then."""
    with replicas_to_kill(2) as replicas, running_ingress(tmp_path, list(replicas), "prefix") as to:
        request = {"prompt": "Once upon a time"}
        own = answered_by(to, request)
        victim = next(each for each in replicas.values() if each.pid == own)
        bodies = [json.dumps({"prompt": f"{n} cats"}).encode() for n in range(20)]
        streams = [OpenStream(to, body) for body in bodies]
        assert {each.process for each in streams} == {each.pid for each in replicas.values()}
        victim.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(answered_by, to, request)
            time.sleep(0.3)  # it lies in the socket of one that will never read it
            victim.kill()
            assert asked.result(timeout=20) != own
