"""Everything around generation: keys, request ids, models, texts and ids, metrics, failures."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import fields
from typing import Any

import pytest

from lexshard.actors.messages import EngineStatistics
from lexshard.actors.statistic import statistics_of
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.api_processes import direct_ingress
from lexshard.serve_app.api_processes.direct_ingress import DirectIngress
from lexshard.serve_app.app import create_app
from lexshard.serve_app.middleware import ProxyHeaders, ingress_middlewares
from tests.support.exposition import unlabelled
from tests.support.mock_engine import VOCABULARY, MockEngine, ids
from tests.support.mock_server import HELLO, TOKENIZER, Client, post, serve


def test_api_keys_guard_the_api_and_leave_health_open() -> None:
    async def check(client: Client) -> None:
        for path in ("/v1/models", "/v1/models/mock", "/tokenizer_info"):
            assert (await client.get(path)).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refused = await client.post(path, json={"prompt": "a"})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == status
        basic = {"Authorization": "Basic first"}
        assert (await client.get("/v1/models", headers=basic)).status_code == 401

    serve(check, api_keys=["first", "second"])


def test_request_ids_are_echoed_when_they_are_harmless() -> None:
    async def check(client: Client) -> None:
        reply = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert reply.headers.get_list("x-request-id") == ["abc-1"]
        reply = await client.get("/nowhere", headers={"x-request-id": "a b"})
        assert len(reply.headers["x-request-id"]) == 32

    serve(check)


def test_a_response_has_the_id_of_its_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lexshard.http")

    async def check(client: Client) -> None:
        bodies: dict[str, dict[str, Any]] = {
            "cmpl": {"prompt": "a"},
            "chatcmpl": {"messages": HELLO},
        }
        for prefix, body in bodies.items():
            path = "/v1/completions" if prefix == "cmpl" else "/v1/chat/completions"
            for asked, header, expected in (
                ({}, {}, None),
                ({}, {"x-request-id": "header"}, "header"),
                ({"request_id": "field"}, {"x-request-id": "header"}, "field"),
            ):
                caplog.clear()
                reply = await client.post(path, json={**body, **asked}, headers=header)
                told = reply.headers["x-request-id"]
                assert reply.json()["id"] == f"{prefix}-{told}"
                assert expected in (None, told)
                assert f"id={told} POST" in caplog.text
        wrong = {"prompt": "a", "request_id": "wrong", "temperature": 0, "priority": -9}
        refused = await client.post("/v1/completions", json=wrong)
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "wrong")

    serve(check)


def test_unknown_paths_and_methods_have_the_error_shape() -> None:
    async def check(client: Client) -> None:
        for path in ("/nowhere", "/v1/embeddings", "/health/"):
            reply = await client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
        reply = await client.get("/v1/completions")
        told = reply.json()["error"]["code"]
        assert (reply.status_code, told) == (405, "method_not_supported")
        assert reply.headers["allow"] == "POST"
        assert (await client.get("/v1/models/other")).status_code == 404

    serve(check)


def test_models_are_listed_under_every_name() -> None:
    async def check(client: Client) -> None:
        data = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in data] == ["org/a", "b"]
        card = (await client.get("/v1/models/org/a")).json()
        assert (card["object"], card["max_model_len"]) == ("model", 4096)

    serve(check, served_model_name=["org/a", "b"])


def test_an_engine_that_is_not_ready_is_told_everywhere() -> None:
    engine = MockEngine(health_reason="the engine is starting")

    async def check(client: Client) -> None:
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        assert "starting" in reply.text
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        reply = await client.post("/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        engine.failure = "no such model"
        assert "retry-after" not in (await client.get("/health")).headers

    serve(check, engine)


def test_texts_and_ids_are_exchanged() -> None:
    async def check(client: Client) -> None:
        reply = (await client.post("/tokenize", json={"prompt": "héy"})).json()
        assert reply == {
            "count": 4,
            "max_model_len": 4096,
            "tokens": list(ids("héy")),
            "token_strs": None,
        }
        body = {"messages": HELLO, "return_token_strs": True, "add_generation_prompt": False}
        reply = (await client.post("/tokenize", json=body)).json()
        assert reply["tokens"] == list(ids("<user>Hi\n"))
        assert reply["token_strs"][-1] == "Ċ"
        reply = await client.post("/detokenize", json={"tokens": list(ids("héy"))})
        assert reply.json() == {"prompt": "héy"}
        for body in ({"tokens": [VOCABULARY]}, {"tokens": ["a"]}, {}):
            reply = await client.post("/detokenize", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
        info = (await client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|end|>"
        assert "message" in info["chat_template"]
        assert info["model_max_length"] == 4096

    serve(check)


def test_metrics_tell_of_engine_and_requests() -> None:
    async def check(client: Client) -> None:
        await client.post("/v1/completions", json={"prompt": "abc"})
        await client.post("/v1/completions", json={"prompt": ""})
        await client.get("/nowhere/" + "x" * 50)
        reply = await client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = unlabelled(reply.text).splitlines()
        request = 'lexshard_http_requests_total{method="%s",path="%s",status="%d"} 1.0'
        assert request % ("POST", "/v1/completions", 200) in lines
        assert request % ("POST", "/v1/completions", 400) in lines
        assert request % ("GET", "other", 404) in lines
        assert "lexshard_steps_total 7.0" in lines
        assert "lexshard_running 2.0" in lines
        assert 'lexshard_http_tokens_total{kind="completion"} 6.0' in lines
        assert "lexshard_time_to_first_token_seconds_count 1.0" in lines

    serve(check)


def test_every_statistic_of_the_engine_is_described() -> None:
    names = {field.name for field in fields(EngineStatistics)}
    descriptions = statistics_of(EngineStatistics)
    gauges = {name for name, declared in descriptions.items() if declared.gauge}
    assert set(descriptions) == names
    assert names > gauges


def test_internal_errors_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = MockEngine()

    def explode(requests: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    engine.submit = explode  # type: ignore[method-assign]
    for streaming in (True, False):
        body = {"prompt": "a", "stream": streaming}
        response = post("/v1/completions", body, engine)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
        assert response.headers["x-request-id"] in caplog.text


def test_clients_cannot_steer_ray_serve() -> None:
    seen: dict[str, Any] = {}

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.update(dict(scope["headers"]))
        ids_twice = [(b"x-request-id", b"a"), (b"x-request-id", b"a")]
        await send({"type": "http.response.start", "status": 200, "headers": ids_twice})

    async def check() -> list[Any]:
        sent: list[Any] = []
        headers = [
            (b"x-request-disconnect-disabled", b"?1"),
            (b"x-request-timeout-seconds", b"1"),
            (b"x-request-id", b"no good"),
            (b"accept", b"*/*"),
        ]

        async def send(message: Any) -> None:
            sent.append(message)

        await ProxyHeaders(inner)({"type": "http", "headers": headers}, None, send)  # type: ignore[arg-type]
        return sent

    [start] = asyncio.run(check())
    assert seen == {b"accept": b"*/*"}
    assert start["headers"] == [(b"x-request-id", b"a")]


def test_the_application_stops_its_engine() -> None:
    engine = MockEngine()
    app = create_app(ServeConfig(model="mock"), engine, TOKENIZER)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            assert not engine.stopped

    asyncio.run(live())
    assert engine.stopped


def test_in_a_replica_serve_keeps_its_own_paths_and_hands_on_the_rest() -> None:
    asked: list[tuple[str, str]] = []

    def app(name: str) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            asked.append((name, scope.get("path", scope["type"])))

        return answer

    async def check() -> None:
        ingress = DirectIngress(app("serve"), app("ours"))
        for path in ("/-/healthz", "/-/routes", "/v1/completions", "/", "/-"):
            await ingress({"type": "http", "path": path}, None, None)  # type: ignore[arg-type]
        for kind in ("websocket", "lifespan"):
            await ingress({"type": kind, "path": kind}, None, None)  # type: ignore[arg-type]

    asyncio.run(check())
    serves = [("serve", "/-/healthz"), ("serve", "/-/routes")]
    ours = [("ours", "/v1/completions"), ("ours", "/"), ("ours", "/-")]
    assert asked == [*serves, *ours, ("ours", "websocket"), ("serve", "lifespan")]


def test_the_application_is_called_in_its_own_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_ingress, "_local", None)
    monkeypatch.setattr("lexshard.serve_app.middleware.die_with_parent", lambda: None)

    async def middlewares() -> list[Any]:
        return [middleware.cls for middleware in ingress_middlewares()]

    async def replica(application: Any) -> list[Any]:
        direct_ingress.answer_here(application)
        return await middlewares()

    assert asyncio.run(middlewares()) == [ProxyHeaders]  # Serve's own proxy
    assert asyncio.run(replica(object())) == [DirectIngress]
    assert asyncio.run(middlewares()) == [ProxyHeaders]  # another loop of the same process
