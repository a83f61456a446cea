"""One text from 1, 2, 4 and 8 shards, however rows are assigned and tokens decided and guessed.

Shards and samplers are threads here, so that every pair of the matrix is run; as processes and Ray
actors a part of it is (`tests.cluster.test_shards`, `tests.serve_app.test_serving_parts`).
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lexshard.actors.configuration import ShardAssignmentMethod
from lexshard.actors.engine.completion import Completion
from lexshard.actors.messages import Request
from tests.support.paths import DEMO_DRAFT, ROOT
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close
from tests.support.thread_shards import sharded_engine

pytestmark = pytest.mark.slow

PROMPTS = 200
TRACE = ROOT / "loadtest" / "data" / "a_kidnapped_santa_claus.txt"
METHODS: tuple[ShardAssignmentMethod, ...] = get_args(ShardAssignmentMethod)
SHARDS, SAMPLERS = (1, 2, 4, 8), (0, 1, 2, 4)  # no sampler: decided in the engine's own thread
DRAFTS: tuple[dict[str, Any], ...] = ({}, {"draft": str(DEMO_DRAFT)}, {"draft": "ngram"})


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    """Every control in turn; what is there twice begins with another token."""
    return requests_of([*prompt_ids, *prompt_ids[: PROMPTS - len(prompt_ids)]], PROMPTS)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[tuple[int, ...]]:
    return tokens(run_and_close(drafting_engine(head="dense"), requests))


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


@pytest.mark.parametrize("shards", SHARDS)
def test_any_number_of_shards_says_the_same_to_200_prompts(
    plain: list[tuple[int, ...]], requests: list[Request], shards: int
) -> None:
    assert tokens(run_and_close(sharded_engine(shards=shards), requests)) == plain


def test_the_papers_head_says_the_same_from_any_number_of_shards(
    plain: list[tuple[int, ...]], requests: list[Request], index: str
) -> None:
    """Whole clusters, and blocks that have parts of them."""
    for shards, method in ((1, METHODS[0]), (3, METHODS[0]), (4, "clusters-semantic")):
        found = sharded_engine(shards=shards, shard_assignment=method, head="paper", index=index)
        assert tokens(run_and_close(found, requests[:48])) == plain[:48]


CASES = [(shards, method) for shards in SHARDS[1:] for method in METHODS]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: "{}-{}".format(*CASES[case]))
def test_every_assignment_with_samplers_and_drafts_of_every_kind(
    plain: list[tuple[int, ...]], requests: list[Request], index: str, case: int
) -> None:
    """Samplers and drafts in turn; each case has a fifth of the prompts, all five have them all."""
    shards, method = CASES[case]
    changes: dict[str, Any] = {
        "shards": shards,
        "shard_assignment": method,
        "samplers": SAMPLERS[(case + case // 4) % 4],
        **DRAFTS[case % 3],
    }
    if method.startswith("clusters"):
        changes["index"] = index
    if method.endswith("hotness"):
        changes["shard_trace"] = str(TRACE)
    own = slice(case % 5, PROMPTS, 5)
    assert tokens(run_and_close(sharded_engine(**changes), requests[own])) == plain[own]
