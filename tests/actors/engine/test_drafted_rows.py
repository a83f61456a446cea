"""Guesses are computed, verified and taken back; they change when tokens come, never which."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.engine.completion import Completion
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.kv_cache import BLOCK_TOKENS, BlockPool, block_hash
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.speculation_cases import (
    Guesses,
    drafting_engine,
    requests_of,
    run_and_close,
)


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 24)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    return run_and_close(drafting_engine(), requests)


@pytest.fixture(scope="module")
def truth(plain: list[Completion]) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {each.prompt_ids: each.token_ids for each in plain}


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_guesses_of_any_quality_change_no_token(
    requests: list[Request], plain: list[Completion], truth: dict, share: float
) -> None:
    """Tokens, reasons and log-probabilities are those without a drafter, to the last bit."""
    drafter = Guesses(truth, share)
    engine = drafting_engine(drafter)
    assert run_and_close(engine, requests) == plain
    assert drafter.right + drafter.wrong > 150


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_bytes": 12},  # blocks
        {"prefix_cache": False, "step_tokens": 24},
        {"samplers": 2, "sampler_placement": "processes"},
        {"head": "dense"},
    ],
    ids=["little room", "small steps", "sampler processes", "dense head"],
)
def test_nor_do_they_however_the_engine_isrun_and_close(
    requests: list[Request], plain: list[Completion], truth: dict, changes: dict[str, Any]
) -> None:
    if "kv_cache_bytes" in changes:
        bytes_per_block = drafting_engine().model.body.kv_bytes_per_block()
        changes = {"kv_cache_bytes": changes["kv_cache_bytes"] * bytes_per_block}
    engine = drafting_engine(Guesses(truth, 0.7), **changes)
    assert run_and_close(engine, requests) == plain
    if "kv_cache_bytes" in changes:
        assert engine.statistics().preemptions > 0


def test_right_guesses_save_steps(
    requests: list[Request], plain: list[Completion], truth: dict
) -> None:
    """What is guessed right needs no step of its own."""
    steps = {}
    for share in (0.0, 1.0):
        engine = drafting_engine(Guesses(truth, share))
        assert run_and_close(engine, requests) == plain
        steps[share] = engine.statistics().steps
    assert steps[1.0] < 0.6 * steps[0.0]


# -- keys, values and names ------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(8, 30),
    step_tokens=st.integers(4, 48),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    data=st.data(),
)
def test_no_block_that_holds_a_guess_has_a_name(
    blocks: int, step_tokens: int, prompts: list[int], data: st.DataObject
) -> None:
    """Under any acceptance, preemption included: named blocks are those of committed tokens, what
    is computed never lies beyond them after a step, and every block comes back."""
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, step_tokens=step_tokens, max_running=4)
    for arrival, length in enumerate(prompts):
        request = Request(str(arrival), 0, (arrival,) * length, SamplingParameters(max_tokens=20))
        scheduler.add(EngineSequence(request, arrival, cast(Any, None), list(request.prompt_ids)))
    steps = 0
    while not scheduler.idle:
        for sequence in scheduler.drawing():
            room = 20 - sequence.output_length - 1
            sequence.drafted = [7] * min(data.draw(st.integers(0, 5)), room)
        plan = scheduler.plan()
        assert plan.tokens <= step_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert len(sequence.blocks) * BLOCK_TOKENS >= chunk.start + chunk.count
            sequence.advance(chunk.count, pool)
            if not chunk.draws:
                continue
            assert chunk.draws == len(chunk.drafted) + 1
            length = len(sequence.token_ids)
            matched = data.draw(st.integers(0, len(chunk.drafted)))
            sequence.token_ids.extend([7] * matched + [8])
            sequence.roll_back(length + matched, pool)
            assert sequence.computed == len(sequence.token_ids) - 1
            name = b""
            for index, known in enumerate(sequence.names):
                tokens = sequence.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                name = block_hash(name, tokens)
                assert len(tokens) == BLOCK_TOKENS
                assert known == name
            if sequence.output_length >= 20:
                scheduler.remove(sequence)
        pool.check()
        steps += 1
        assert steps < 5_000
    assert pool.used == 0


def test_nobody_gives_up_blocks_for_a_guess() -> None:
    """Two sequences fill all blocks; guesses that would need one more are not computed."""
    pool = BlockPool(2)
    scheduler = Scheduler(pool, step_tokens=64, max_running=2)
    for arrival in range(2):
        prompt = (arrival,) * (BLOCK_TOKENS - 1)
        request = Request(str(arrival), 0, prompt, SamplingParameters(max_tokens=20))
        scheduler.add(EngineSequence(request, arrival, cast(Any, None), list(prompt)))
    for chunk in scheduler.plan().chunks:
        chunk.sequence.advance(chunk.count, pool)
        chunk.sequence.token_ids.append(7)
    for sequence in scheduler.drawing():
        sequence.drafted = [7, 7]
    chunks = scheduler.plan().chunks
    assert [(chunk.count, chunk.drafted) for chunk in chunks] == [(1, ()), (1, ())]
    assert scheduler.preemptions == 0
