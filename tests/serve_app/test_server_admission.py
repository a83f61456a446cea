"""Limits: what is refused before it costs anything, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from lexshard.serve_app.admission import Admission
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.prompts import estimated_tokens
from tests.support.exposition import unlabelled
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
        assert refused.json()["error"]["type"] == "service_unavailable_error"
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


def test_each_sequence_counts_for_its_client() -> None:
    """Else one request with n = 128 takes what the limit was to keep for others."""
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        refused = await client.post("/v1/completions", json={"prompt": "x", "n": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        first = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "n": 3}))
        await until(lambda: engine.running == 3)
        refused = await client.post("/v1/completions", json={"prompt": ["x", "y"]})
        assert refused.status_code == 429
        assert "3 of the 4" in refused.text
        assert "retry-after" in refused.headers
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert (await first).status_code == 200

    serve(check, engine, max_requests_per_client=4)


def test_the_tokenizer_is_not_free() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        bodies = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [97]}}
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 200
        first = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: engine.running == 1)
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 429
        assert (await first).status_code == 200

    serve(check, engine, max_requests_per_client=1)


# -- what a request costs --------------------------------------------------------------------------


def test_choices_share_the_cost_of_their_prompt_unless_they_are_scored() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.1))
    prompt = list(ids("x" * 100))
    costs = [
        ({"n": 4}, 100),
        ({"n": 4, "prompt_logprobs": 0}, 400),
        ({"n": 4, "echo": True, "logprobs": 0}, 400),
        ({"n": 4, "echo": True}, 100),
        ({"n": 2, "truncate_prompt_tokens": 10}, 10),
        ({"n": 1, "max_tokens": 3000}, 100),
    ]

    async def check(client: Client) -> None:
        for fields, expected in costs:
            body = {"prompt": prompt, **fields}
            asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await until(lambda: engine.running > 0)
            text = unlabelled((await client.get("/metrics")).text)
            assert f"lexshard_admitted_waiting_tokens {expected}.0" in text
            assert (await asked).status_code == 200
            text = unlabelled((await client.get("/metrics")).text)
            assert "lexshard_admitted_waiting_tokens 0.0" in text

    serve(check, engine)


def test_a_client_with_a_limit_has_half_of_the_waiting_room() -> None:
    admission = Admission(10, 100, max_requests_per_client=5)
    greedy = admission.admit("greedy", 1, 300)  # nothing of theirs waits
    with pytest.raises(ApiError, match="300 of your prompt tokens") as refused:
        admission.admit("greedy", 1, 1)
    assert refused.value.status == 429
    modest = admission.admit("modest", 1, 50)
    with pytest.raises(ApiError, match="350 prompt tokens") as refused:
        admission.admit("third", 1, 1)
    assert refused.value.status == 503
    modest.set_waiting(10)
    third = admission.admit("third", 1, 40)
    for ticket in (greedy, modest, third):
        ticket.release()
        ticket.release()
    assert (admission.sequences, admission.waiting_tokens) == (0, 0)
    admission.admit("greedy", 1, 100)


def test_without_a_limit_the_whole_room_is_everybodys() -> None:
    admission = Admission(10, 100, max_requests_per_client=None)
    admission.admit("one", 1, 60)
    admission.admit("one", 1, 40)
    for client in ("one", "two"):
        with pytest.raises(ApiError) as refused:
            admission.admit(client, 1, 1)
        assert refused.value.status == 503
    admission.admit("two", 1, 0)


def test_refused_requests_leave_nothing_behind() -> None:
    async def check(client: Client) -> None:
        for body in ({"prompt": [VOCABULARY]}, {"prompt": "x", "max_tokens": 9999}):
            for streaming in (True, False):
                reply = await client.post("/v1/completions", json={**body, "stream": streaming})
                assert reply.status_code == 400
        text = unlabelled((await client.get("/metrics")).text)
        assert "lexshard_admitted_sequences 0.0" in text
        assert "lexshard_admitted_waiting_tokens 0.0" in text

    serve(check)
