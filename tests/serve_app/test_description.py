"""`/openapi.json` and `/docs`: they tell of all there is, and the server does what they tell."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.app import create_app
from lexshard.serve_app.description.fields import MEANINGS, TRANSLATED_MEANINGS
from lexshard.serve_app.description.openapi import OPERATIONS, meanings_of
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import TOKENIZER, listening
from tests.support.quick import slow
from tests.support.scored_pairs import PAIRS, labels_only

KEY = "the-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MODELS = {model for operation in OPERATIONS for model in operation.requests}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(labels_only(), api_keys=[KEY], **PAIRS) as url:
        yield url


@pytest.fixture(scope="module")
def description(url: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/openapi.json")  # no key, as /docs needs none
    assert reply.status_code == 200
    told: dict[str, Any] = reply.json()
    return told


def test_every_route_is_described(description: dict[str, Any]) -> None:
    app = create_app(ServeConfig(model="mock", **PAIRS), MockEngine(), TOKENIZER)
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }
    about_itself = {("/openapi.json", "get"), ("/docs", "get")}
    about_itself |= {each for each in routes if each[0] == "/" or "/playground/" in each[0]}
    told = {(path, way) for path, ways in description["paths"].items() for way in ways}
    assert told == routes - about_itself


def test_every_field_is_described_with_its_limits(description: dict[str, Any]) -> None:
    for model in MODELS:
        own = TRANSLATED_MEANINGS.get(model.__name__, {})
        assert model.model_fields.keys() <= meanings_of(model).keys()
        assert not any(meaning == MEANINGS.get(name) for name, meaning in own.items())
    fields = {name for model in MODELS for name in model.model_fields}
    told = {name for own in TRANSLATED_MEANINGS.values() for name in own}
    assert fields == MEANINGS.keys() | told
    schemas = description["components"]["schemas"]
    for model in MODELS:
        schema = schemas[model.__name__]
        assert schema["properties"].keys() == model.model_fields.keys()
        assert all(field["description"] for field in schema["properties"].values())
        assert schema["additionalProperties"] == {"type": "null"}
    chat = schemas["ChatCompletionRequest"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["stop"]["anyOf"][1]["maxItems"] == 16
    assert chat["properties"]["n"]["anyOf"][0]["maximum"] == 128
    assert chat["properties"]["tools"]["anyOf"][0]["maxItems"] == 512
    assert chat["properties"]["functions"]["enum"] == [None, []]


def test_the_examples_are_answered(url: str, description: dict[str, Any]) -> None:
    asked = 0
    for operation in OPERATIONS:
        for model in operation.requests:
            for example in description["components"]["schemas"][model.__name__]["examples"]:
                reply = httpx.post(url + operation.path, json=example, headers=HEADERS)
                assert reply.status_code == 200, reply.text
                asked += 1
    assert asked == sum(len(operation.requests) for operation in OPERATIONS)


def test_the_page_has_everything_and_loads_nothing(url: str, description: dict[str, Any]) -> None:
    reply = httpx.get(f"{url}/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = reply.text
    assert "://" not in page
    assert not re.search(r"<(script|link|img|iframe)", page)
    for path in description["paths"]:
        assert f" {path}</h2>" in page
    for name, schema in description["components"]["schemas"].items():
        assert name.endswith("Request") or f"<h2 id={name}>" in page
        for field in schema["properties"]:
            assert f"<code>{field}</code>" in page


def test_keys_and_the_path_of_a_proxy_are_told(description: dict[str, Any]) -> None:
    guarded = {path for path, ways in description["paths"].items() if "security" in str(ways)}
    unguarded = {"/health", "/ping", "/load", "/metrics", "/version"}
    assert description["paths"].keys() - guarded == unguarded
    schemes = description["components"]["securitySchemes"]
    for path, ways in description["paths"].items():
        for way in ways.values():
            named = {
                schemes[name].get("name", "bearer")
                for each in way.get("security", ())
                for name in each
            }
            own = {"x-api-key"} if path.startswith("/v1/messages") else set()
            assert named in (set(), {"bearer"} | own)
    with listening(root_path="/llm") as url:
        told = httpx.get(f"{url}/llm/openapi.json").json()
    assert told["servers"] == [{"url": "/llm"}]
    assert "security" not in str(told)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("--phases examples,fuzzing,stateful --max-examples 5", 100),
        slow("--phases coverage --include-path /v1/completions", 300),
        slow("--max-examples 10", 4000),
    ],
)
def test_every_answer_is_as_described(url: str, tmp_path: Path, options: str, least: int) -> None:
    """Schemathesis asks what the description allows and what it forbids, at every edge of it and by
    examples. What it allows may be refused all the same: JSON Schema cannot tell one field by
    another."""
    command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run"]
    command += [f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--exclude-checks", "positive_data_acceptance", *options.split()]
    command += ["--generation-deterministic"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout[-6000:] + told.stderr[-3000:]
    [cases] = re.findall(r"(\d+) generated, \1 passed", told.stdout)
    assert int(cases) > least
