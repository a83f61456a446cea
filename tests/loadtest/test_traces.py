"""Traces: what is shipped can be read, what is no trace is refused with its line, and prompts have
the lengths and the shared beginnings of a trace."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lexshard.loadtest.bench.load.plan import Lengths
from lexshard.loadtest.prompts import PromptWriter
from lexshard.loadtest.traces import BLOCK_TOKENS, SAMPLE_FOLDER, SAMPLES, TraceError, load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(**changed: Any) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps({**fields, **changed}) + "\n"


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_that_is_shipped_can_be_read(name: str) -> None:
    trace = load_trace(name)
    assert trace.timed
    assert len(trace.requests) >= 200
    assert trace.requests[0].seconds == 0
    assert trace.requests[-1].seconds > 60
    assert (SAMPLE_FOLDER / SAMPLES[name]).stat().st_size < 64 << 10
    readme = (SAMPLE_FOLDER / "README.md").read_text(encoding="utf-8")
    assert SAMPLES[name] in readme


def test_lengths_and_times_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        AZURE + "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:05.4799600,3,8\r\n"
    )
    requests = load_trace(str(path)).requests
    assert [(each.prompt_tokens, each.output_tokens) for each in requests] == [(4808, 10), (3, 8)]
    assert requests[1].seconds == pytest.approx(1.5)


def test_gzipped_traces_and_those_without_times_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    header = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
    path.write_bytes(gzip.compress((header + "37,54,91,0.7\n").encode()))
    trace = load_trace(str(path))
    assert not trace.timed
    assert trace.requests[0][1:3] == (37, 54)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        (AZURE, "a header and no request"),
        ("a,b,c\n1,2,3\n", "line 1: not a trace"),
        (AZURE + "2023-11-16 18:17:03,5\n", "line 2: 2 columns"),
        (AZURE + "yesterday,5,6\n", "line 2: 'yesterday' is no time"),
        (AZURE + "2023-11-16 18:17:03,5,many\n", "line 2: GeneratedTokens 'many'"),
        (AZURE + "2023-11-16 18:17:03,0,6\n", "ContextTokens '0' is no positive"),
        (
            AZURE + "2023-11-16 18:17:03,5,6\n2023-11-16 18:17:02,5,6\n",
            "request 2: comes before",
        ),
        (mooncake() + "{nonsense\n", "line 2: no JSON"),
        ('{"timestamp": 0}\n', "line 1: expected an object with"),
        (mooncake(timestamp="soon"), "timestamp 'soon'"),
        (mooncake(input_length=1.5), "input_length 1.5"),
        (mooncake(hash_ids=[1]), "1 hash_ids for 600 tokens, expected 2"),
        (mooncake(hash_ids=["a", "b"]), "no list of whole numbers"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(TraceError, match=said):
        load_trace(str(path))


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How long the beginning is that two sequences share."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_share_exactly_the_blocks_that_the_trace_shares() -> None:
    scale, tokens_per_word = 0.1, 1.6
    requests = Lengths(load_trace("mooncake-conversation"), scale).of_requests(60)
    writer = PromptWriter(3, tokens_per_word, BLOCK_TOKENS * scale)
    prompts = [writer.write(i, each.prompt_tokens, each.blocks) for i, each in enumerate(requests)]
    block_words = round(BLOCK_TOKENS * scale / tokens_per_word)
    for (first, one), (second, other) in itertools.combinations(
        zip(requests, prompts, strict=True), 2
    ):
        shared = alike(first.blocks, second.blocks)
        words = alike(one.split(), other.split())
        shortest = min(len(one.split()), len(other.split()))
        assert words >= min(shared * block_words, shortest)
        assert words <= shared * block_words + 2


def test_prompts_have_their_lengths_and_are_the_same_for_a_seed() -> None:
    writer = PromptWriter(7, 1.6, 50.0)
    for tokens in (1, 16, 333):
        assert len(writer.write(4, tokens).split()) == max(1, round(tokens / 1.6))
    assert writer.write(4, 100) == PromptWriter(7, 1.6, 50.0).write(4, 100)
    beginnings = {tuple(writer.write(index, 100).split()[:4]) for index in range(500)}
    assert len(beginnings) == 500


def test_lengths_are_scaled_and_cut() -> None:
    trace = load_trace("azure-conversation")
    scaled = Lengths(trace, 0.1, max_prompt_tokens=40, max_output_tokens=5).of_requests(900)
    assert scaled[0].prompt_tokens == 37
    assert max(each.prompt_tokens for each in scaled) == 40
    assert {each.output_tokens for each in scaled} <= set(range(1, 6))
    assert scaled[800][1:] == scaled[0][1:]
