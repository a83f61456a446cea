"""Clients that nobody here wrote, each in an environment of its own with what is newest: they raise
what they raise with OpenAI's own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lexshard.actors.messages import Request
from tests.support import client_errors
from tests.support.mock_engine import MockEngine, Script, spell
from tests.support.mock_server import listening

OPENAI = {
    "context": "BadRequestError",
    "context, streamed": "BadRequestError",
    "key": "AuthenticationError",
    "model": "NotFoundError",
    "value": "BadRequestError",
    "failure": "InternalServerError",
    "failure, streamed": "APIError",
}
# By the package to install: what it is called in the script, and the classes of its own.
CLIENTS = {
    "openai": ("openai", {}),
    "llm": ("llm", {}),
    "instructor": ("instructor", {}),
    "litellm": (
        "litellm",
        {
            "context": "ContextWindowExceededError",
            "context, streamed": "ContextWindowExceededError",
            "failure, streamed": "MidStreamFallbackError",
        },
    ),
    "langchain-openai": (
        "langchain",
        {
            "context": "ContextOverflowError",
            "context, streamed": "ContextOverflowError",
            "key": "ModelAuthenticationError",
            "model": "ModelNotFoundError",
            "value": "ModelInvalidRequestError",
            "failure": "ModelAPIError",
        },
    ),
}


def scripted(request: Request) -> Script:
    prompt = bytes(token for token in request.prompt_ids if token < 256).decode()
    if "break" in prompt:
        return Script([(97,)], error="broken")
    if "fail" in prompt:
        return Script([], error="broken")
    return spell('{"a": 1}')


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(MockEngine(max_model_len=2048, script=scripted), api_keys=["key"]) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("package", CLIENTS)
def test_a_client_raises_what_it_raises_with_openais_server(
    url: str, package: str, tmp_path: Path
) -> None:
    name, own = CLIENTS[package]
    python = tmp_path / "venv" / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", python.parent.parent], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", python, package]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no {package} can be had here: {installed.stderr[-300:]}")
    variables = {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    told = subprocess.run(
        [python, client_errors.__file__, name, f"{url}/v1", "key", "mock"],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    raised = json.loads(told.stdout.splitlines()[-1])
    assert raised.pop("answered") == []
    for case, classes in raised.items():
        if (name, case) == ("instructor", "failure, streamed"):
            continue  # it does not stream
        assert {OPENAI[case], own.get(case, OPENAI[case])} <= {*classes}, case
