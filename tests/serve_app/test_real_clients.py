"""Clients of other projects, each in an environment of its own with what is newest: they raise
what they raise with OpenAI's own server, and a real server of the demo chats with them, streams, is
held to their schemas and has their tools called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.messages import Request
from tests.support import client_errors
from tests.support.mock_engine import MockEngine, Script, spell
from tests.support.mock_server import listening
from tests.support.real_server import Server, running_server

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
# Scripts of the folder ``clients``, by the package to install.
SCRIPTS = {
    "openai": "ask_openai.py",
    "anthropic": "ask_anthropic.py",
    "langchain-openai": "ask_langchain_openai.py",
    "langchain-anthropic": "ask_langchain_anthropic.py",
    "litellm": "ask_litellm.py",
    "instructor": "ask_instructor.py",
    "pydantic-ai": "ask_pydantic_ai.py",
    "llama-index-llms-openai-like": "ask_llama_index.py",
    "openai-agents": "ask_openai_agents.py",
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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("demo")
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text("key\n")
    with running_server(folder, "--api-key-file", str(keys)) as server:
        yield server


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script where a package is installed, and gives the JSON of its last line."""

    @cache
    def installed(package: str) -> Path:
        python = tmp_path_factory.mktemp(package) / "venv" / "bin" / "python"
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", python.parent.parent], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", python, package]
        told = subprocess.run(install, capture_output=True, text=True, check=False)
        if told.returncode:
            pytest.skip(f"no {package} can be had here: {told.stderr[-300:]}")
        return python

    def run(package: str, script: Path, *arguments: str) -> Any:
        python = installed(package)
        variables = {"HOME": str(python.parents[2]), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        told = subprocess.run(
            [python, script, *arguments],
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("package", CLIENTS)
def test_a_client_raises_what_it_raises_with_openais_server(
    url: str, run: Run, package: str
) -> None:
    name, own = CLIENTS[package]
    raised = run(package, Path(client_errors.__file__), name, f"{url}/v1", "key", "mock")
    assert raised.pop("answered") == []
    for case, classes in raised.items():
        if (name, case) == ("instructor", "failure, streamed"):
            continue  # it does not stream
        assert {OPENAI[case], own.get(case, OPENAI[case])} <= {*classes}, case


@pytest.mark.slow
@pytest.mark.parametrize("package", SCRIPTS)
def test_a_client_chats_streams_gets_objects_and_has_its_tool_called(
    demo: Server, run: Run, package: str
) -> None:
    """The demo calls no tool by itself: the first turn requires a call (or names its function), the
    turn with the result leaves the choice to the model."""
    script = Path(__file__).with_name("clients") / SCRIPTS[package]
    for protocol, told in run(package, script, demo.url, "key", "lexshard-demo").items():
        assert len(told["pieces"]) > 1, protocol
        assert "".join(told["pieces"]) == told["plain"], protocol
        assert told["booking"]["room"] in ("inside", "terrace"), protocol
        assert told["booking"]["guests"] in (1, 2, 3, 4), protocol
        assert told["booking"]["late"] in (False, True), protocol
        assert told["called"], protocol
        assert {*told["called"]} <= {"today", "tomorrow"}, protocol
        assert told["answer"], protocol
