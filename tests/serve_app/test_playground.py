"""The page at ``/``: who gets it, what it may load, what it asks, and who may kill by it."""

from __future__ import annotations

import argparse
import os
import re
import signal
from typing import Any

import httpx
import pytest

from lexshard.actors.role import Place, RunningRole, here
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.build import page_as_asked
from lexshard.serve_app.commands.option_flags import add_option_flags, given_options
from lexshard.serve_app.playground.page import FOLDER, KINDS
from lexshard.serve_app.start.preflight import check_settings
from lexshard.serve_app.start.readiness import StartupError
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import Client, complete, post, serve, stream

KILL = "/playground/kill"
HERE = "http://127.0.0.1:8000"
MOST_BYTES, MOST_LINES = 250_000, 1_860
FILES = [each for each in FOLDER.iterdir() if each.suffix in KINDS]


def fetched(path: str, **config: Any) -> httpx.Response:
    async def get(client: Client) -> httpx.Response:
        return await client.get(path)

    reply: httpx.Response = serve(get, **config)
    return reply


def test_it_is_there_on_loopback_and_elsewhere_where_it_is_asked_for() -> None:
    assert fetched("/").status_code == 200
    for absent in ({"playground": False}, {"host": "0.0.0.0"}):
        for path in ("/", "/playground/main.js", "/playground/about"):
            assert fetched(path, **absent).status_code == 404
    assert fetched("/", host="0.0.0.0", playground=True).status_code == 200
    names = {"127.0.0.9": True, "::1": True, "localhost": True, "a.example": False}
    for host, own in names.items():
        assert ServeConfig(model="a", host=host).has_playground == own


def test_a_proxys_path_has_it_and_who_cannot_know_where_it_listens_has_none() -> None:
    assert fetched("/llm/", root_path="/llm").status_code == 200
    assert fetched("/llm/playground/main.js", root_path="/llm").status_code == 200
    assert not page_as_asked(ServeConfig(model="a")).has_playground
    asked = page_as_asked(ServeConfig(model="a", playground=True, playground_kills=True))
    assert (asked.has_playground, asked.lets_page_kill) == (True, False)


def test_it_kills_unasked_where_nothing_says_that_strangers_come() -> None:
    assert ServeConfig(model="a").lets_page_kill
    for told in ({"api_keys": ["k"]}, {"api_key_file": "f"}, {"root_path": "/llm"}):
        assert not ServeConfig(model="a", **told).lets_page_kill
        assert ServeConfig(model="a", playground_kills=True, **told).lets_page_kill


def test_it_is_small_and_needs_nothing_from_elsewhere() -> None:
    contents = {each: each.read_text(encoding="utf-8") for each in FILES}
    assert sum(len(text.encode()) for text in contents.values()) <= MOST_BYTES
    assert sum(len(text.splitlines()) for text in contents.values()) <= MOST_LINES
    for path, text in contents.items():
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|\beval\(|document\.write", text), path
    index = contents[FOLDER / "index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index)
    names = set(re.findall(r'(?:src|href)="playground/([\w.]+)"', index))
    assert names == {path.name for path in FILES} - {"index.html"}, "each is loaded, and is there"


def test_a_policy_lets_it_run_and_load_its_own_files_alone() -> None:
    for path in ("/", "/playground/main.js", "/playground/style.css"):
        policy = fetched(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


def test_a_file_that_is_known_is_not_sent_again_and_none_is_read_beside_them() -> None:
    async def check(client: Client) -> None:
        first = await client.get("/playground/main.js")
        known = {"if-none-match": first.headers["etag"]}
        again = await client.get("/playground/main.js", headers=known)
        assert (again.status_code, again.content) == (304, b"")
        for name in (
            "page.py",
            "..%2Fapp.py",
            "%2Fetc%2Fpasswd",
            "index.html",
            "none.js",
            f"{'a' * 300}.js",
        ):
            assert (await client.get(f"/playground/{name}")).status_code == 404, name

    serve(check)


def test_keys_guard_what_it_knows_and_not_the_page_itself() -> None:
    assert fetched("/", api_keys=["key"]).status_code == 200
    assert fetched("/playground/about", api_keys=["key"]).status_code == 401
    about = fetched("/playground/about").json()
    assert about["models"] == ["mock"]
    assert about["kills"] is True


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been killed."""
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: done.append(what))
    return done


ENGINE, ELSEWHERE = 4_000_001, 4_000_002


class Roles(MockEngine):
    async def roles(self) -> list[RunningRole]:
        host = here().host
        return [
            RunningRole("api", 0, here(), "cpu", ""),
            RunningRole("body", 0, Place(host, ENGINE), "cpu", ""),
            RunningRole("shard", 1, Place("another", ELSEWHERE), "cpu", ""),
        ]


def kill(process_id: int, headers: dict[str, str] | None = None, **config: Any) -> int:
    asked = {"host": "127.0.0.1:8000", "origin": HERE, **(headers or {})}

    async def send(client: Client) -> int:
        reply = await client.post(KILL, json={"process_id": process_id}, headers=asked)
        return reply.status_code

    status: int = serve(send, Roles(), **config)
    return status


def test_its_button_kills_a_process_of_the_engine_and_no_other(killed: list[Any]) -> None:
    assert kill(ENGINE) == 200
    assert killed == [(ENGINE, signal.SIGKILL)]
    for other in (1, os.getpid(), ELSEWHERE):
        assert kill(other) == 404
    assert len(killed) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:9000"},
        {"host": "rebound.example:8000", "origin": "http://rebound.example:8000"},
        {"host": "", "origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_no_page_of_another_site_presses_it(killed: list[Any], headers: dict[str, str]) -> None:
    assert kill(ENGINE, headers) == 403
    assert killed == []


def test_no_form_presses_it(killed: list[Any]) -> None:
    async def send(client: Client) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"host": "127.0.0.1:8000", "origin": HERE, "content-type": kind}
            content = f'{{"process_id": {ENGINE}}}'
            reply = await client.post(KILL, content=content, headers=headers)
            assert reply.status_code == 400
        assert (await client.get(KILL)).status_code in (404, 405)

    serve(send, Roles())
    assert killed == []


def test_beyond_loopback_it_takes_a_flag_and_a_key(killed: list[Any]) -> None:
    open_to_all: dict[str, Any] = {"host": "0.0.0.0", "playground": True}
    assert kill(ENGINE, **open_to_all) == 403
    assert kill(ENGINE, playground_kills=False) == 403
    asked = open_to_all | {"playground_kills": True}
    with pytest.raises(StartupError, match="API keys"):
        check_settings(ServeConfig(model="a", **asked))
    guarded = asked | {"api_keys": ["key"]}
    check_settings(ServeConfig(model="a", **guarded))
    assert kill(ENGINE, **guarded) == 401
    own = {"host": "a.example", "origin": "http://a.example", "authorization": "Bearer key"}
    assert kill(ENGINE, own, **guarded) == 200
    assert len(killed) == 1


def test_its_options_are_flags_with_a_no_and_variables(
    no_options_of_the_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    add_option_flags(parser)

    def told(*flags: str) -> ServeConfig:
        return given_options(parser.parse_args(["--model", "a", *flags])).config()

    assert told().playground is None
    assert told("--no-playground").has_playground is False
    assert told("--host", "0.0.0.0", "--playground").has_playground
    monkeypatch.setenv("LEXSHARD_PLAYGROUND", "false")
    assert told().has_playground is False


def test_candidates_are_told_with_their_exact_logits() -> None:
    told = complete({"candidates": 2, "max_tokens": 1})["choices"][0]["candidates"]
    assert told[0].keys() == {"token_id", "bytes", "logit", "logprob", "rank", "top"}
    assert [told[0]["logit"], *(each["logit"] for each in told[0]["top"])] == [8.5, 9.75, 8.5]
    assert complete({})["choices"][0].keys().isdisjoint({"candidates", "token_bytes"})
    refused = post("/v1/completions", {"prompt": "a", "candidates": 2, "logprobs": 2})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "candidates"


def test_the_bytes_of_every_token_are_told_in_a_stream() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "return_token_bytes": True}
    choices = [each["choices"][0] for each in stream("/v1/chat/completions", body)]
    content = b"".join(bytes(each) for choice in choices for each in choice["token_bytes"])
    assert content.startswith(b"Hello")
