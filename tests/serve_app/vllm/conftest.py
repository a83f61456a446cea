"""Engines that the tests of this folder share: a start takes a quarter of a minute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from lexshard.loadtest.bench.synthetic.jobs import story_tokens
from tests.support.vllm_engines import DEMO, MISSING, PYTHON, PluginEngine, plugin_engine


def _engine(plugin: bool, **arguments: Any) -> Iterator[PluginEngine]:
    if not PYTHON.exists():
        pytest.skip(MISSING)
    with plugin_engine(plugin=plugin, **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def certified() -> Iterator[PluginEngine]:
    yield from _engine(plugin=True)


@pytest.fixture(scope="module")
def plain() -> Iterator[PluginEngine]:
    yield from _engine(plugin=False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two hundred excerpts of a story."""
    text = story_tokens(AutoTokenizer.from_pretrained(str(DEMO)))
    width = (len(text) - 40) // 200
    return [text[place * width : place * width + 8 + place % 32] for place in range(200)]
