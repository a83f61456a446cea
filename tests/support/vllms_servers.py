"""For pytest among vLLM's own tests: one running server for all files that ask for the same.

Every server has the demo under all names that tests ask for. Of the flags that a test starts its
server with those of `TELLING` are obeyed; the others are of another model, of GPUs, or hold here
already. Loaded with ``-p``, before any file of vLLM's, whose tests are called ``tests``, too.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import pytest

from tests import utils

# A small model may fill its context with blanks where a grammar lets it.
STRUCTURED = {"disable_any_whitespace": True, "backend": "xgrammar"}
COMMON = (
    *("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"),
    *("--enforce-eager", "--enable-prompt-tokens-details", "--disable-log-stats"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", json.dumps(STRUCTURED)),
)
# A flag, and what the test that gives it needs of a server.
TELLING = {
    "--return-tokens-as-token-ids": ("--return-tokens-as-token-ids",),
    "--max-logprobs": ("--max-logprobs", "-1"),
    "--max-num-batched-tokens": ("--max-num-batched-tokens", "100", "--max-model-len", "8192"),
}
_Own: Any = utils.RemoteOpenAIServer
_kept: dict[tuple[str, ...], Any] = {}


class SharedServer(_Own):  # type: ignore[misc]
    """As vLLM's, but for the flags; it ends when another is asked for, or with the last test."""

    def __new__(cls, model: str, arguments: list[str], **settings: Any) -> Any:
        told = [what for flag, what in TELLING.items() if flag in arguments]
        every = (*COMMON, *(part for each in told for part in each))
        if every not in _kept:
            while _kept:
                _kept.popitem()[1]._shutdown()
            names = json.loads(os.environ["LEXSHARD_NAMES"])
            _kept[every] = _Own(model, [*every, "--served-model-name", *names])
        return nullcontext(_kept[every])


utils.RemoteOpenAIServer = SharedServer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that ask for the same server stand together."""
    telling = {
        item.path: [flag in item.path.read_text(encoding="utf-8") for flag in TELLING]
        for item in items
    }
    items.sort(key=lambda item: telling[item.path])
