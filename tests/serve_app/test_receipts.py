"""Receipts as clients get them, verified by the server and by the command, which needs none."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lexshard.actors.messages import FinishReason, Request, SamplingParameters, SequenceEvent
from lexshard.actors.receipts.document import (
    ARITHMETIC_VERSION,
    VERSION,
    Arithmetic,
    DigestChain,
    Provenance,
    Receipt,
    options_of,
    read_receipt,
)
from lexshard.actors.receipts.signature import Signer, signed_by
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.cli import main
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.receipts import issuing
from lexshard.serve_app.receipts.issuing import ReceiptIssuer
from lexshard.serve_app.start.preflight import check_receipt_key
from lexshard.serve_app.start.readiness import StartupError
from tests.support.faults import processes_of
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import events, post
from tests.support.paths import DEMO, DEMO_DRAFT, ROOT
from tests.support.real_server import Server, running_server, wait

VERIFY = "/v1/receipts/verify"
OUTLIVING = 350  # tokens of a reply whose engine is killed at its twentieth piece
HELLO = [{"role": "user", "content": "Tell me of a fox."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["red", "grey"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Once upon a time", "The sea"], "n": 2, "max_tokens": 30},
    "/v1/chat/completions": {
        "messages": HELLO,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "/v1/responses": {"input": "Tell me of a fox.", "max_output_tokens": 20},
    "/v1/messages": {"messages": HELLO, "max_tokens": 20, "stop_sequences": ["the"]},
}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key.pem"
    path.touch(0o600)
    private = serialization.PrivateFormat.PKCS8
    path.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, private, serialization.NoEncryption()
        )
    )
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Iterator[Server]:
    flags = ("--draft", str(DEMO_DRAFT), "--receipt-key", str(key), "--samplers", "1")
    with running_server(tmp_path_factory.mktemp("receipts"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def receipts(server: Server) -> list[dict[str, Any]]:
    """Of every route."""
    return [each for path in ASKED for each in asked(server, path)]


def in_reply(reply: dict[str, Any]) -> list[dict[str, Any]]:
    holders = reply.get("choices", [reply])
    return [each["receipt"] for each in holders]


def asked(server: Server, path: str, **more: Any) -> list[dict[str, Any]]:
    body = {**ASKED[path], "seed": 11, "receipt": True, **more}
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return in_reply(reply.json())


def verdicts(server: Server, receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reply = httpx.post(server.url + VERIFY, json={"receipts": receipts}, timeout=60)
    assert reply.status_code == 200, reply.text
    data: list[dict[str, Any]] = reply.json()["data"]
    assert [each["index"] for each in data] == list(range(len(receipts)))
    return data


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_ends_with_the_receipts_of_the_whole_reply(server: Server, path: str) -> None:
    body = {**ASKED[path], "seed": 11, "receipt": True, "stream": True}
    told = httpx.post(server.url + path, json=body, timeout=60)
    streamed: list[dict[str, Any]] = []
    for line in told.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            event = event.get("response", event)
            streamed += [each["receipt"] for each in event.get("choices", [event])
                         if "receipt" in each]  # fmt: skip
    whole = asked(server, path)
    assert sorted(streamed, key=json.dumps) == sorted(whole, key=json.dumps)
    assert len(whole) == (4 if path == "/v1/completions" else 1)


def test_who_does_not_ask_gets_none(server: Server) -> None:
    for path, body in ASKED.items():
        for told in ({}, {"receipt": False}):
            assert '"receipt"' not in httpx.post(server.url + path, json=body | told).text


def test_every_reply_is_made_again_and_signed(
    server: Server, receipts: list[dict[str, Any]], key: Path
) -> None:
    found = verdicts(server, receipts)
    assert [each for each in found if not each["equal"]] == []
    assert {each["signed_by"] for each in found} == {Signer.read(key).public_key}
    assert all(signed_by(read_receipt(each)) for each in receipts)
    per_token = [len(json.dumps(each["digests"])) / len(each["output_ids"]) for each in receipts]
    assert max(per_token[:4]) < 16


def test_what_was_altered_is_found(server: Server, receipts: list[dict[str, Any]]) -> None:
    unsigned = copy.deepcopy(receipts[0])
    del unsigned["signature"]
    unsigned["output_ids"][7] += 1
    seed = {**unsigned, "seed": "12"}
    first, second = verdicts(server, [unsigned, seed])
    assert (first["equal"], first["reason"], first["equal_tokens"]) == (False, "altered", 7)
    assert first["found_token_id"] == unsigned["output_ids"][7]
    assert first["expected_token_id"] == receipts[0]["output_ids"][7]
    assert (second["equal"], second["equal_tokens"]) == (False, 0)
    signed = {**unsigned, "signature": receipts[0]["signature"]}
    refused = httpx.post(server.url + VERIFY, json={"receipts": [signed]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "receipts")
    assert "signature" in refused.json()["error"]["message"]


def test_where_a_stop_string_ended_a_reply_is_proven(server: Server) -> None:
    """Whoever has such a receipt can write the digest of another end."""
    path = "/v1/completions"
    found: list[dict[str, Any]] = []
    for stop, more in (
        ("the", {}),
        (["\n", " a"], {"include_stop_str_in_output": True}),
        ("e", {"min_tokens": 5, "skip_special_tokens": False}),
    ):
        found += asked(server, path, prompt="Once upon a time", stop=stop, **more)
    found += asked(server, path, prompt="Once upon a time", max_tokens=0, echo=True, n=1)
    found += asked(server, "/v1/messages", max_tokens=200, stop_sequences=["fox", ","])
    chat = {"messages": HELLO, "tools": TOOLS, "tool_choice": "auto", "stop": [","]}
    found += in_reply(
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**chat, "max_tokens": 60, "receipt": True},
            timeout=60,
        ).json()
    )
    assert len([each for each in found if isinstance(each["stop_reason"], str)]) > 4
    assert [each["output_ids"] for each in found if each["options"]["max_tokens"] == 0] == [[]]
    assert [each for each in verdicts(server, found) if not each["equal"]] == []
    whole = next(each for each in found if each["stop_reason"] == "the")
    del whole["signature"]
    for stop_reason in ("the", "said by me"):
        cut = read_receipt(whole)
        tokens = len(cut.output_ids) - 2
        chain = cut.chain()
        chain.add([0] * tokens, [0.0] * tokens)
        end = chain.end("stop", stop_reason)
        digests = (*cut.digests[:tokens], end)
        ended = {"output_ids": cut.output_ids[:tokens], "stop_reason": stop_reason}
        [verdict] = verdicts(server, [replace(cut, digests=digests, **ended).as_json()])
        assert (verdict["equal"], verdict["reason"]) == (False, "altered")


def test_a_stream_tells_how_far_each_has_come_and_then_the_same(
    server: Server, receipts: list[dict[str, Any]]
) -> None:
    wrong = copy.deepcopy(receipts[0])
    del wrong["signature"]
    wrong["output_ids"][7] += 1
    asked = [wrong, *receipts[1:]]
    body = {"receipts": asked, "stream": True}
    reply = httpx.post(server.url + VERIFY, json=body, timeout=60)
    told = events(reply)
    whole = verdicts(server, asked)
    assert told[-len(asked) :] == whole
    steps = told[: -len(asked)]
    assert {each["object"] for each in steps} == {"receipt.progress"}
    for i, verdict in enumerate(whole):
        equal = [each["equal_tokens"] for each in steps if each["index"] == i]
        assert equal == sorted(equal)
        assert equal[-1] == verdict["equal_tokens"]


HERE = Provenance("a" * 64, "b" * 64, Arithmetic(ARITHMETIC_VERSION, "float32", "fused", "-"), ())


async def provenance(*_: Any) -> Provenance:
    return HERE


def a_receipt() -> Receipt:
    options = options_of(SamplingParameters(temperature=0.0, max_tokens=3, seed=5))
    chain = DigestChain(HERE, 5, 0, options, None, (1, 2, 3))
    chain.add((4, 5, 6), (1.0, 1.0, 1.0))
    chain.end("length", None)
    said = (1, 2, 3), (4, 5, 6), "length", None, chain.header, tuple(chain.digests)
    return Receipt(VERSION, HERE, 5, 0, options, None, *said)


@pytest.mark.timeout(60)
def test_a_receipt_that_has_its_verdict_leaves_its_place_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an engine that takes one sequence at a time."""

    class OnePlace(MockEngine):
        def submit(self, requests: Sequence[Request]) -> Any:
            self.made, self.left = super().submit(requests), list(requests)
            self.say()
            return self.made

        def say(self) -> None:
            if self.left:
                wrong = SequenceEvent(self.left.pop(0).request_id, 0, (9,), logits=(1.0,))
                self.made.put(wrong)

        def cancel(self, request_id: str) -> None:
            super().cancel(request_id)
            self.say()

    monkeypatch.setattr(ReceiptIssuer, "provenance", provenance)
    reply = post(VERIFY, {"receipts": [a_receipt().as_json()] * 3}, OnePlace())
    assert [each["found_token_id"] for each in reply.json()["data"]] == [4, 4, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "status"), [("abort", 503), ("error", 500)])
def test_an_engine_that_is_gone_says_nothing_of_a_receipt(
    reason: FinishReason, status: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"receipts": [a_receipt().as_json()], "stream": stream}

    class Failing(MockEngine):
        def submit(self, requests: Sequence[Request]) -> Any:
            made = super().submit(requests)
            made.put(SequenceEvent.failure(requests[0], "no more", reason))
            return made

    monkeypatch.setattr(ReceiptIssuer, "provenance", provenance)
    reply = post(VERIFY, body, Failing())
    told = events(reply)[-1] if stream else reply.json()
    assert stream or reply.status_code == status
    assert ("no more" in told["error"]["message"]) == (reason == "abort")  # why, where it passes
    assert "not its own" not in reply.text


def test_what_is_no_receipt_is_refused(server: Server, receipts: list[dict[str, Any]]) -> None:
    good = copy.deepcopy(receipts[4])  # with a grammar
    del good["signature"]
    options = good["options"]
    wrong: list[Any] = [
        {},
        {"version": VERSION},
        {**good, "prompt_ids": [10**9]},
        {**good, "prompt_ids": [1] * 5000},
        {**good, "options": {**options, "grammar": "%json {"}},
        {**good, "options": {**options, "grammar": "start: " + "a " * 10**5}},
        {**good, "options": {**options, "temperature": 1e9}},
        {**good, "options": {**options, "logit_bias": [[10**8, 1.0]]}},
        {**good, "output_ids": []},
        {**good, "choice": -5},
    ]
    for told in wrong:
        reply = httpx.post(server.url + VERIFY, json={"receipts": [told]}, timeout=60)
        assert reply.status_code == 400, (told, reply.text)
    for body in ([], {"receipts": [1]}, {"receipts": [good] * 65}, {"receipts": 5}):
        assert httpx.post(server.url + VERIFY, json=body).status_code == 400
    assert verdicts(server, []) == []
    assert verdicts(server, [good])[0]["equal"]


@pytest.mark.slow
def test_a_reply_that_outlived_its_engine_has_a_receipt_like_any_other(server: Server) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": OUTLIVING,
        "ignore_eos": True,
        "seed": 5,
        "receipt": True,
        "stream": True,
    }
    found: list[dict[str, Any]] = []
    pieces = 0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces += 1
            if pieces == 20:
                [engine] = processes_of(server, "engine")
                engine.kill()
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            found += [choice["receipt"]] if "receipt" in choice else []
    [receipt] = found
    assert len(receipt["output_ids"]) == OUTLIVING
    del body["stream"]
    [undisturbed] = in_reply(
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    )
    assert undisturbed == receipt
    [verdict] = verdicts(server, [receipt])
    assert (verdict["equal"], verdict["equal_tokens"]) == (True, OUTLIVING)
    with ThreadPoolExecutor(1) as beside:
        replaying = beside.submit(verdicts, server, [receipt] * 64)
        wait(lambda: server.metric("lexshard_running") > 10, 30, "the replays")
        [engine] = processes_of(server, "engine")
        engine.kill()
        assert all(each["equal"] for each in replaying.result(120))


@pytest.mark.slow
def test_the_command_compares_the_texts_of_whole_replies(
    tmp_path: Path, server: Server, capsys: Any
) -> None:
    chat = {"messages": HELLO, "max_tokens": 40}
    for number, (path, more) in enumerate(
        (
            ("/v1/completions", {**ASKED["/v1/completions"], "echo": True}),
            ("/v1/completions", {"prompt": "A fox", "stop": ["the"], "max_tokens": 60}),
            (
                "/v1/completions",
                {"prompt": "A fox", "stop": "e", "include_stop_str_in_output": True},
            ),
            (
                "/v1/completions",
                {"prompt": [5, 900, 77], "skip_special_tokens": False, "echo": True},
            ),
            ("/v1/chat/completions", {**chat, "tools": TOOLS, "tool_choice": "auto"}),
            ("/v1/chat/completions", ASKED["/v1/chat/completions"]),
        )
    ):
        body = {**more, "seed": 5, "receipt": True}
        reply = httpx.post(server.url + path, json=body, timeout=60)
        (tmp_path / f"{number}.json").write_text(reply.text)
    command = ["replay", str(tmp_path), "--model", str(DEMO), "--threads", "1"]
    assert main(command) == 0
    assert capsys.readouterr().out.count(", and the text") == 9
    edited = tmp_path / "1.json"
    told = json.loads(edited.read_text())
    told["choices"][0]["text"] += "!"
    edited.write_text(json.dumps(told))
    assert main(command) == 1
    assert "its text differs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_needs_no_server(tmp_path: Path, receipts: Any, capsys: Any) -> None:
    def replay(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "lexshard.serve_app.cli", "replay", *arguments]
        command += ["--model", str(DEMO), "--threads", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    replies = tmp_path / "replies"
    replies.mkdir()
    (replies / "a.json").write_text(json.dumps({"choices": [{"receipt": receipts[0]}]}))
    (replies / "b.jsonl").write_text("\n".join(map(json.dumps, receipts[1:])) + "\n")
    public = receipts[0]["signature"]["public_key"]
    code, told = replay(str(replies), "--signed-by", public)
    assert code == 0, told
    assert f"{len(receipts)} of {len(receipts)} equal" in told
    wrong = copy.deepcopy(receipts[0])
    del wrong["signature"]
    wrong["output_ids"][3] += 1
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    code, told = replay(str(tmp_path / "wrong.json"), "--json", str(tmp_path / "verdicts"))
    assert code == 1, told
    assert "NOT EQUAL (altered, 3 of 30 tokens equal): token 3 is" in told
    assert json.loads((tmp_path / "verdicts").read_text())[0]["equal_tokens"] == 3
    for arguments in (
        [str(tmp_path / "wrong.json"), "--signed-by", public],
        [str(tmp_path / "nowhere")],
        [str(DEMO / "config.json")],
    ):
        assert main(["replay", *arguments, "--model", str(DEMO)]) == 2
        told = "".join(capsys.readouterr())
        assert len(told.splitlines()) == 1, told


def test_a_key_that_others_can_read_signs_nothing(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(key.parent))
    config = ServeConfig(model="mock", receipt_key="~/key.pem")
    check_receipt_key(config)
    assert config.with_absolute_paths().receipt_key == str(key)
    assert Signer.read("~/key.pem").public_key == Signer.read(key).public_key
    others = tmp_path / "key.pem"
    others.write_bytes(key.read_bytes())
    others.chmod(0o644)
    for path, told in ((others, "can read .*key.pem: chmod 600 it"), (tmp_path / "no", "No such")):
        with pytest.raises(StartupError, match=f"--receipt-key: .*{told}"):
            check_receipt_key(ServeConfig(model="mock", receipt_key=str(path)))


def test_first_receipts_wait_for_one_look_at_the_models_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would read all weights in a process of its own. One that fails is no last word, and a
    client that leaves ends it for no other."""
    looks: list[str] = []

    async def look(model: str) -> tuple[str, str]:
        looks.append(model)
        await asyncio.sleep(0.02)
        if len(looks) == 1:
            raise ApiError(500, "unreadable")
        return "weights", "tokenizer"

    async def ten() -> list[Provenance | BaseException]:
        asked = [asyncio.create_task(issuer.provenance(information)) for _ in range(10)]
        await asyncio.sleep(0.01)
        asked[0].cancel()
        return (await asyncio.gather(*asked, return_exceptions=True))[1:]

    async def scenario() -> None:
        assert [str(each) for each in await ten()] == ["unreadable"] * 9
        assert {type(each) for each in await ten()} == {Provenance}

    monkeypatch.setattr(issuing, "_hashes", look)
    issuer = ReceiptIssuer(ServeConfig(model="mock"))
    information = replace(MockEngine().information, processor="avx2")
    asyncio.run(scenario())
    assert len(looks) == 2


def test_where_logits_depend_on_the_batch_receipts_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay computes many rows at once: it would say of a server's own that they are not."""

    async def hashes(_: str) -> tuple[str, str]:
        return "weights", "tokenizer"

    monkeypatch.setattr(issuing, "_hashes", hashes)
    issuer = ReceiptIssuer(ServeConfig(model="mock"))
    told = replace(MockEngine().information, processor="a GPU", batch_invariant=False)
    with pytest.raises(ApiError, match="start with --batch-invariant") as refused:
        asyncio.run(issuer.provenance(told))
    assert (refused.value.status, refused.value.parameter) == (400, "receipt")
    assert asyncio.run(issuer.provenance(replace(told, batch_invariant=True)))


def test_where_tokens_depend_on_drafts_receipts_are_refused() -> None:
    body = {"prompt": "a", "receipt": True}
    config = {"draft": "draft", "verify": "same-distribution"}
    with pytest.raises(ApiError, match="--verify same-distribution"):
        asyncio.run(
            ReceiptIssuer(ServeConfig(model="mock", **config)).provenance(MockEngine().information)
        )
    refused = post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "receipt")
