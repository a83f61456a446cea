"""Keys and values of guesses: taken back, never named, never in the place of another's."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.kv_cache import BLOCK_TOKENS, BlockPool, block_hash
from lexshard.actors.messages import Request, SamplingParameters


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


def test_no_blocks_are_given_up_for_a_guess() -> None:
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
