"""For pytest among vLLM's own tests: one running server for all files that ask for the same.

Every server has the demo under all names that tests ask for. Of the flags that a test starts its
server with those of `TELLING` are obeyed; the others are of another model, of GPUs, or hold here
already. Loaded with ``-p``, outside of our own package: vLLM's tests are called ``tests``, too.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import pytest

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


def pytest_configure() -> None:
    """Puts such servers in the place of those that vLLM's tests start."""
    from tests import utils

    own, kept = utils.RemoteOpenAIServer, dict[tuple[str, ...], Any]()

    class SharedServer(own):  # type: ignore[misc, valid-type]
        """As vLLM's, but for the flags, and ended with the last test of all."""

        def __new__(cls, model: str, arguments: list[str], **settings: Any) -> Any:
            told = [what for flag, what in TELLING.items() if flag in arguments]
            names = json.loads(os.environ["LEXSHARD_NAMES"])
            every = (*COMMON, *(part for each in told for part in each))
            if every not in kept:
                while kept:
                    kept.popitem()[1]._shutdown()
                server = object.__new__(own)
                own.__init__(server, model, [*every, "--served-model-name", *names])
                kept[every] = server
            return nullcontext(kept[every])

    utils.RemoteOpenAIServer = SharedServer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that ask for the same server stand together."""
    telling = {
        item.path: [flag in item.path.read_text(encoding="utf-8") for flag in TELLING]
        for item in items
    }
    items.sort(key=lambda item: telling[item.path])
