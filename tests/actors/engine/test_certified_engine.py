"""An engine whose head is certified writes what one with a dense head writes, token for token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.head.ladder import STEP_KINDS
from lexshard.actors.head.screens import DENSE
from lexshard.actors.messages import EngineStatistics, Request, SamplingParameters
from tests.support.demo_engine import demo_engine
from tests.support.paths import ROOT

MAX_TOKENS = 24
PLAIN = SamplingParameters(max_tokens=MAX_TOKENS, ignore_eos=True)
PENALISED = replace(PLAIN, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)
BIAS = ((11, 3.0), (200, -100.0), (300, 1.5))
# The demo's own defaults, as its generation_config.json has them.
DEFAULT = replace(PLAIN, temperature=0.8, top_k=50, top_p=0.95)
SETTINGS: dict[str, SamplingParameters] = {
    "greedy": replace(PLAIN, temperature=0.0),
    "greedy, penalties": replace(PENALISED, temperature=0.0),
    "T 1": replace(PLAIN, temperature=1.0),
    "T 0.7, top-k 50, top-p 0.9": replace(PLAIN, temperature=0.7, top_k=50, top_p=0.9),
    "T 0.7, top-p 0.9": replace(PLAIN, temperature=0.7, top_p=0.9),
    "T 1, min-p 0.05, bias": replace(PLAIN, temperature=1.0, min_p=0.05, logit_bias=BIAS),
    "T 1, top-k 50, bias, penalties": replace(
        PENALISED, temperature=1.0, top_k=50, logit_bias=BIAS
    ),
    "default": DEFAULT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where indexes are built: nothing is taken from an earlier run."""
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def certified(folder: Path) -> Iterator[Engine]:
    engine = demo_engine(head="certified", index=str(folder / "certified.safetensors"))
    yield engine
    engine.check_idle()


@pytest.fixture(scope="module")
def dense() -> Iterator[Engine]:
    engine = demo_engine(head="dense")
    yield engine
    engine.check_idle()


@pytest.fixture(scope="module")
def more_prompt_ids(
    prompt_ids: list[tuple[int, ...]], demo_tokenizer: Any
) -> list[tuple[int, ...]]:
    """All 500 prompts, cut to 200 tokens."""
    with (ROOT / "tests" / "data" / "more_prompts.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    return prompt_ids + [tuple(demo_tokenizer(text).input_ids[:200]) for text in texts]


def _tokens(
    engine: Engine, prompts: list[tuple[int, ...]], parameters: SamplingParameters
) -> list[tuple[int, ...]]:
    requests = [
        Request(f"r{i}", 0, prompt, replace(parameters, seed=1000 + i))
        for i, prompt in enumerate(prompts)
    ]
    done = run_to_completion(engine, requests)
    assert all(each.error is None for each in done)
    return [each.token_ids for each in done]


def _compare(ours: Engine, theirs: Engine, prompts: list[tuple[int, ...]], name: str) -> None:
    """Both engines' tokens with one setting."""
    expected = _tokens(theirs, prompts, SETTINGS[name])
    assert _tokens(ours, prompts, SETTINGS[name]) == expected, name
    assert sum(map(len, expected)) == len(prompts) * MAX_TOKENS


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("count", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_certified_equals_dense(
    certified: Engine,
    dense: Engine,
    more_prompt_ids: list[tuple[int, ...]],
    count: int,
    name: str,
) -> None:
    """24 tokens of each prompt, with each of eight settings."""
    assert len(more_prompt_ids) == 500
    _compare(certified, dense, more_prompt_ids[:count], name)


@pytest.mark.slow
def test_the_papers_head_equals_dense(
    dense: Engine, folder: Path, prompt_ids: list[tuple[int, ...]]
) -> None:
    """20 prompts with half of the settings, by cluster bounds alone."""
    paper = demo_engine(head="paper", index=str(folder / "paper.safetensors"))
    for name in list(SETTINGS)[::2]:
        _compare(paper, dense, prompt_ids[:20], name)
    paper.check_idle()


# -- how often a certificate decides --------------------------------------------------------------


def _increase(before: EngineStatistics, after: EngineStatistics) -> tuple[int, float]:
    """Rows decided, and the share of them that a certificate of a tier decided."""
    rows = after.head_rows - before.head_rows
    return rows, (after.head_certified_rows - before.head_certified_rows) / rows


@pytest.mark.parametrize("together", [1, 8, 40])
def test_default_sampling_is_certified(
    certified: Engine, prompt_ids: list[tuple[int, ...]], together: int
) -> None:
    """At least 95% of the tokens come from low-precision screens and their candidates alone."""
    defaults = certified.information.default_sampling
    assert (defaults["temperature"], defaults["top_k"], defaults["top_p"]) == (0.8, 50, 0.95)
    before = certified.statistics()
    for start in range(0, 40, 40 if together == 40 else 20):
        _tokens(certified, prompt_ids[start : start + together], DEFAULT)
    rows, share = _increase(before, certified.statistics())
    print(f"{together} together: {share:.1%} of {rows} rows certified")
    assert rows >= 2 * MAX_TOKENS
    assert share >= 0.95


def test_auto_takes_certificates_or_says_why_not(
    folder: Path, prompt_ids: list[tuple[int, ...]]
) -> None:
    """Where the fastest head is not the certified one, the dense one was measured to be faster."""
    engine = demo_engine(head="auto", index=str(folder / "certified.safetensors"))
    _tokens(engine, prompt_ids[:8], DEFAULT)
    _, share = _increase(EngineStatistics(), engine.statistics())
    timings = engine.information.head_timings
    print(f"{share:.1%} certified; {engine.information.head}; {timings}")
    steps = {(kind, rows) for kind, rows, _, _ in timings}
    assert {(kind, 1) for kind in STEP_KINDS} <= steps
    fastest = {
        step: min((ms, screen) for kind, rows, screen, ms in timings if (kind, rows) == step)[1]
        for step in steps
    }
    assert share >= 0.95 or DENSE in fastest.values()
