"""Masks across processes: any number of shards and samplers says masked decoding."""

from __future__ import annotations

from typing import Any

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from lexshard.cluster.samplers.start import start_sampler
from tests.support.demo_engine import demo_engine
from tests.support.grammar_cases import (
    GRAMMARS,
    MaskedDecoding,
    grammar_requests,
    random_schemas,
    schema_grammar,
    told,
)
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.speculation_cases import run_and_close
from tests.support.thread_shards import ThreadShards

FEW, MANY = 26, 500
DRAFT = {"draft": str(DEMO_DRAFT), "draft_length": "fixed"}
QUICK: tuple[dict[str, Any], ...] = (
    {"shards": 2},
    {"shards": 3, "shard_assignment": "blocks-contiguous"},
    {"samplers": 2, "sampler_placement": "processes"},
)
PLACES: tuple[dict[str, Any], ...] = (
    {},
    DRAFT,
    {"draft": "ngram"},
    {"shards": 2},
    {"shards": 4, **DRAFT},
    {"samplers": 2, "sampler_placement": "processes", **DRAFT},
    {"shards": 2, "samplers": 2, "sampler_placement": "processes"},
)
Said = list[tuple[tuple[int, ...], str]]


def expected(requests: list[Request]) -> Said:
    engine = demo_engine(head="dense", max_model_len=128, dtype="auto")
    try:
        return MaskedDecoding(engine).say(requests)
    finally:
        engine.close()


def said(requests: list[Request], settings: dict[str, Any]) -> Said:
    configuration = EngineConfiguration(
        str(DEMO), device="cpu", threads=1, max_model_len=128, **settings
    )
    starter = ThreadShards(configuration) if configuration.shards > 1 else None
    return told(run_and_close(Engine(configuration, start_sampler, None, starter), requests))


@pytest.fixture(scope="module")
def few(prompt_ids: list[tuple[int, ...]]) -> tuple[list[Request], Said]:
    requests = grammar_requests(prompt_ids, FEW)
    return requests, expected(requests)


@pytest.mark.parametrize("settings", QUICK, ids=str)
def test_any_place_says_masked_decoding(
    few: tuple[list[Request], Said], settings: dict[str, Any]
) -> None:
    requests, truth = few
    assert said(requests, settings) == truth


@pytest.fixture(scope="module")
def many(prompt_ids: list[tuple[int, ...]]) -> tuple[list[Request], Said]:
    grammars = (*GRAMMARS, *map(schema_grammar, random_schemas(40)))
    requests = grammar_requests(prompt_ids, MANY, grammars)
    return requests, expected(requests)


@pytest.mark.slow
@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_any_place_says_masked_decoding_to_500_requests_of_50_schemas(
    many: tuple[list[Request], Said], settings: dict[str, Any]
) -> None:
    requests, truth = many
    assert said(requests, settings) == truth
