"""``/generative_scoring``, and what the server tells in vLLM's shapes."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from lexshard.serve_app.openai.prompts import Prompt
from lexshard.serve_app.scoring import labels
from tests.support.mock_engine import BOS, VOCABULARY, MockEngine, ids
from tests.support.mock_server import Client, post, serve
from tests.support.scored_pairs import labels_only

PATH = "/generative_scoring"
ASKED: dict[str, Any] = {"query": "q", "items": ["a", "bc"], "label_token_ids": [65, 66]}


def scored(body: dict[str, Any], engine: MockEngine) -> list[float]:
    reply = post(PATH, {**ASKED, **body}, engine)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    assert {each["object"] for each in data} == {"score"}
    return [each["score"] for each in data]


def test_each_item_is_one_sequence_of_one_token_whose_labels_alone_are_computed() -> None:
    engine = labels_only()
    assert scored({}, engine) == pytest.approx([0.5, 0.5])
    told = [(each.prompt_ids, each.parameters.allowed_ids) for each in engine.requests]
    assert told == [(prompt, (65, 66)) for prompt in (ids("qa"), ids("qbc"))]
    assert {each.parameters.max_tokens for each in engine.requests} == {1}
    assert {(each.parameters.labels, each.parameters.logprobs) for each in engine.requests} == {
        (True, 2)
    }
    engine = labels_only()
    scored({"apply_softmax": False}, engine)
    assert {(each.parameters.labels, each.parameters.allowed_ids) for each in engine.requests} == {
        (False, (65,))
    }


def test_scores_are_told_as_vllm_tells_them() -> None:
    body = post(PATH, {**ASKED, "request_id": "mine"}, labels_only()).json()
    assert (body["id"], body["object"], body["model"]) == (
        "generative-scoring-mine",
        "list",
        "mock",
    )
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 0
    assert scored({"apply_softmax": False}, labels_only()) == [math.exp(-1.5)] * 2
    assert scored({"label_token_ids": [65]}, labels_only()) == [1.0, 1.0]
    three = scored({"label_token_ids": [65, 66, 67, 65]}, labels_only())
    assert three == pytest.approx([1 / 3] * 2)


def test_prompts_are_put_together_as_asked() -> None:
    engine = labels_only()
    scored({"item_first": True, "label_token_ids": [65]}, engine)
    scored({"query": [BOS, 7], "items": [[8], [9]], "label_token_ids": [65]}, engine)
    told = [each.prompt_ids for each in engine.requests]
    assert told == [ids("aq"), ids("bcq"), (BOS, 7, 8), (BOS, 7, 9)]


def test_long_prompts_are_put_together_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[str] = set()

    def made(*parts: Any) -> Prompt:
        threads.add(threading.current_thread().name.partition("_")[0])
        return Prompt(*parts)

    monkeypatch.setattr(labels, "Prompt", made)
    engine = labels_only()
    scored({"query": [7] * 3000, "items": [[8], [9]]}, engine)
    assert [each.prompt_ids[-2:] for each in engine.requests] == [(7, 8), (7, 9)]
    assert threads == {"text"}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [VOCABULARY]}, "label_token_ids"),
        ({"label_token_ids": list(range(65))}, "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": ["a", [1]]}, "items"),
        ({"items": [""]}, "items"),
        ({"items": ["a" * 5000]}, "items"),
        ({"items": [[1], [VOCABULARY]]}, "items"),
        ({"query": [VOCABULARY]}, "query"),
        ({"query": ""}, "query"),
        ({"priority": -1}, "priority"),
        ({"apply_sofmax": True}, "apply_sofmax"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_with_scoring_is_named(fields: dict[str, Any], parameter: str) -> None:
    engine = labels_only()
    reply = post(PATH, {**ASKED, **fields}, engine)
    assert reply.status_code == (404 if parameter == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == parameter
    assert engine.requests == []


def test_more_sequences_than_the_server_runs_are_refused() -> None:
    reply = post(PATH, ASKED, labels_only(), max_running_requests=1)
    assert reply.status_code == 400
    assert "2" in reply.json()["error"]["message"]


def test_the_server_tells_of_itself_in_vllms_shapes() -> None:
    async def check(client: Client) -> None:
        key = {"Authorization": "Bearer key"}
        for ping in (await client.get("/ping"), await client.post("/ping")):
            assert (ping.status_code, ping.content) == (200, b"")
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.get("/server_info")).status_code == 401
        told = (await client.get("/server_info", headers=key)).json()
        assert told["vllm_config"]["model_config"]["served_model_name"] == ["mock"]
        assert "key" not in str(told["vllm_config"].values())
        for path, words in (
            ("/v1/embeddings", "no embeddings"),
            ("/v1/score", "/generative_scoring"),
            ("/v1/rerank", "/generative_scoring"),
            ("/v1/load_lora_adapter", "LoRA"),
        ):
            refused = await client.post(path, json={}, headers=key)
            assert refused.status_code == 404
            assert words in refused.json()["error"]["message"]

    serve(check, api_keys=["key"])


def test_ping_waits_for_the_engine() -> None:
    engine = MockEngine(health_reason="loading")

    async def check(client: Client) -> None:
        for path in ("/ping", "/server_info"):
            told = await client.get(path)
            assert told.status_code == 503
            assert int(told.headers["Retry-After"]) > 0
        engine.failure = "it cannot start"
        assert "Retry-After" not in (await client.get("/ping")).headers

    serve(check, engine)
