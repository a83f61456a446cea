"""An engine in bfloat16: two tokens' values share a word, and no token depends on its neighbour."""

from __future__ import annotations

from typing import Any

import pytest

from lexshard.actors.engine.completion import Completion
from lexshard.actors.messages import Request
from tests.support.paths import DEMO_DRAFT
from tests.support.quick import quick
from tests.support.speculation_cases import Guesses, drafting_engine, requests_of, run_and_close

BFLOAT16 = {"dtype": "bfloat16"}
BLOCK_BYTES = 32_768  # of keys and values of 16 tokens
MODEL = {"draft": str(DEMO_DRAFT)}
CHANGES: dict[str, dict[str, Any]] = {
    "dense head": {"head": "dense"},
    "short steps": {"step_tokens": 7},
    "uncached": {"prefix_cache": False, "step_tokens": 24},
    "little room": {"kv_cache_bytes": 12 * BLOCK_BYTES},
    "draft model": {**MODEL, "draft_length": "fixed"},
    "draft model, little room": {**MODEL, "kv_cache_bytes": 12 * BLOCK_BYTES},
    "three threads": {"threads": 3},
}


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 24)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    """What is said without a drafter: tokens, reasons and log-probabilities, to the last bit."""
    return run_and_close(drafting_engine(**BFLOAT16), requests)


def test_it_says_something_else_than_float32(
    requests: list[Request], plain: list[Completion]
) -> None:
    """Though not often: what is rounded decides between tokens that are nearly as good."""
    exact = run_and_close(drafting_engine(), requests)
    pairs = [
        (ours, theirs)
        for a, b in zip(plain, exact, strict=True)
        for ours, theirs in zip(a.token_ids, b.token_ids, strict=False)
    ]
    assert 0.5 < sum(ours == theirs for ours, theirs in pairs) / len(pairs) < 1.0


@pytest.mark.parametrize("name", quick(CHANGES, "draft model", "three threads", "little room"))
def test_no_circumstance_changes_a_token(
    requests: list[Request], plain: list[Completion], name: str
) -> None:
    engine = drafting_engine(**BFLOAT16, **CHANGES[name])
    assert run_and_close(engine, requests) == plain
    if "kv_cache_bytes" in CHANGES[name]:
        assert engine.statistics().preemptions > 0


@pytest.mark.slow
def test_the_general_body_says_the_same_with_guesses_and_without(requests: list[Request]) -> None:
    general = {**BFLOAT16, "body": "general"}
    expected = run_and_close(drafting_engine(**general), requests)
    assert run_and_close(drafting_engine(**general, **MODEL), requests) == expected


@pytest.mark.parametrize(
    "changes", quick([{}, {"kv_cache_bytes": 12 * BLOCK_BYTES}, {"samplers": 2}], {})
)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_guesses_that_are_taken_back_change_no_token(
    requests: list[Request], plain: list[Completion], share: float, changes: dict[str, Any]
) -> None:
    """What a guess left in a word is written over, and the token before it stays."""
    truth = {each.prompt_ids: each.token_ids for each in plain}
    drafter = Guesses(truth, share)
    assert run_and_close(drafting_engine(drafter, **BFLOAT16, **changes), requests) == plain
    assert drafter.right + drafter.wrong > 150
