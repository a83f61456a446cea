"""Fixtures shared by the tests: the demo model, its tokenizer, real prompts."""

from __future__ import annotations

import gc
import json
import os
import ssl
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.paths import DEMO, ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# What modules leave in memory is never garbage: looking for some among it is a quarter of the time
# that collecting tests takes, and goes on between them.
gc.disable()

# Every client of httpx reads all certificates anew, which takes it 40 ms.
ssl.create_default_context = cache(ssl.create_default_context)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two cores are shared by pytest and the servers it starts."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """160 real first turns (see tests/data/README.md)."""
    with (ROOT / "tests" / "data" / "prompts.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def prompt_ids(prompts: list[str], demo_tokenizer: Any) -> list[tuple[int, ...]]:
    """The prompts as token ids, cut to 200."""
    return [tuple(demo_tokenizer(prompt).input_ids[:200]) for prompt in prompts]
