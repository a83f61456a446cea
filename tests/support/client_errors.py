"""Asks a server through a client that is installed here, and tells which exceptions it raises.

Imports nothing of ours. Run by ``test_real_clients.py`` in an environment of each client's own:
``python client_errors.py CLIENT URL KEY MODEL``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

LONG = "word " * 2000
# What each request differs in from one that is answered.
CASES: dict[str, dict[str, Any]] = {
    "answered": {},
    "context": {"content": LONG},
    "context, streamed": {"content": LONG, "stream": True},
    "key": {"key": "wrong"},
    "model": {"model": "other"},
    "value": {"max_tokens": -1},
    "failure": {"content": "fail"},
    "failure, streamed": {"content": "break", "stream": True},
}


def openai(url: str) -> Callable[..., Any]:
    import openai

    def ask(model: str, key: str, content: str, stream: bool, **fields: Any) -> None:
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        messages: Any = [{"role": "user", "content": content}]
        reply = client.chat.completions.create(
            model=model, messages=messages, stream=stream, **fields
        )
        if stream:
            list(reply)

    return ask


def litellm(url: str) -> Callable[..., Any]:
    import litellm

    litellm.suppress_debug_info = True

    def ask(model: str, key: str, content: str, stream: bool, **fields: Any) -> None:
        messages = [{"role": "user", "content": content}]
        reply = litellm.completion(
            model=f"openai/{model}",
            api_base=url,
            api_key=key,
            messages=messages,
            stream=stream,
            num_retries=0,
            max_retries=0,
            **fields,
        )
        if stream:
            list(reply)

    return ask


def langchain(url: str) -> Callable[..., Any]:
    from langchain_openai import ChatOpenAI

    def ask(model: str, key: str, content: str, stream: bool, **fields: Any) -> None:
        chat = ChatOpenAI(model=model, base_url=url, api_key=key, max_retries=0, **fields)
        if stream:
            list(chat.stream(content))
        else:
            chat.invoke(content)

    return ask


def instructor(url: str) -> Callable[..., Any]:
    import instructor
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: int

    def ask(model: str, key: str, content: str, stream: bool, **fields: Any) -> None:
        client = instructor.from_openai(
            openai.OpenAI(base_url=url, api_key=key, max_retries=0), mode=instructor.Mode.MD_JSON
        )
        messages = [{"role": "user", "content": content}]
        client.chat.completions.create(
            model=model, messages=messages, response_model=Answer, max_retries=0, **fields
        )

    return ask


def llm(url: str) -> Callable[..., Any]:
    from llm.default_plugins.openai_models import Chat

    def ask(model: str, key: str, content: str, stream: bool, **fields: Any) -> None:
        chat = Chat(model_id="m", key=key, model_name=model, api_base=url)
        chat.prompt(content, stream=stream, **fields).text()

    return ask


def raised(ask: Callable[[], Any]) -> list[str]:
    """The classes of what was raised and of what caused it."""
    error: BaseException | None = None
    names: list[str] = []
    try:
        ask()
    except Exception as raised:
        error = raised
    while error is not None:
        names += [kind.__name__ for kind in type(error).__mro__[:-3]]
        error = error.__cause__
    return names


def main(name: str, url: str, key: str, model: str) -> None:
    ask = globals()[name](url)
    usual = {"model": model, "key": key, "content": "json", "stream": False}
    print(json.dumps({case: raised(partial(ask, **usual | own)) for case, own in CASES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
