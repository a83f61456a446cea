"""Limits: what is refused before it costs anything, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.openai.prompts import estimated_tokens
from tests.support.mock_engine import VOCABULARY, MockEngine, ids, spell
from tests.support.mock_server import Client, post, serve, until


def test_a_full_server_says_503_and_when_to_come_back() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        body = {"prompt": "x", "n": 3}
        first = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: engine.running == 3)
        refused = await client.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    serve(check, engine, max_running_requests=4)


def test_waiting_prompt_tokens_are_bounded() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        long = {"prompt": list(ids("x" * 200))}
        first = asyncio.ensure_future(client.post("/v1/completions", json=long))
        await until(lambda: engine.running == 1)
        refused = await client.post("/v1/completions", json=long)
        assert refused.status_code == 503
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=long)).status_code == 200

    serve(check, engine, max_waiting_tokens=100)


def test_a_prompt_that_cannot_fit_is_refused_before_it_costs_anything() -> None:
    text = "a" * 2_000_000
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
    }
    for path, body in bodies.items():
        response = post(path, body)
        assert response.status_code == 400
        assert "2000000 characters" in response.json()["error"]["message"]


def test_no_prompt_is_expected_to_wait_with_more_tokens_than_fit() -> None:
    """Else a text that is going to be truncated shuts everyone out while it is tokenised."""
    assert estimated_tokens(["a" * 5_000, [1] * 500, "b"], 100) == 100 + 100 + 1


def test_bad_words_are_bounded_together() -> None:
    words = ["a" * 1024] * 16
    assert post("/v1/completions", {"prompt": "a", "bad_words": words}).status_code == 200
    response = post("/v1/completions", {"prompt": "a", "bad_words": [*words, "b"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "bad_words"


def test_messages_do_not_repeat_everything_a_client_wrote() -> None:
    for body in ({"prompt": "a", "k" * 100_000: 1}, {"prompt": "a", "model": "m" * 100_000}):
        assert len(post("/v1/completions", body).content) < 1000


def test_one_client_may_have_a_limit() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        first = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: engine.running == 1)
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        assert (await first).status_code == 200

    serve(check, engine, max_requests_per_client=1)


def test_refused_requests_leave_nothing_behind() -> None:
    async def check(client: Client) -> None:
        for body in ({"prompt": [VOCABULARY]}, {"prompt": "x", "max_tokens": 9999}):
            for streaming in (True, False):
                reply = await client.post("/v1/completions", json={**body, "stream": streaming})
                assert reply.status_code == 400
        text = (await client.get("/metrics")).text
        assert "lexshard_admitted_sequences 0.0" in text
        assert "lexshard_admitted_waiting_tokens 0.0" in text

    serve(check)
