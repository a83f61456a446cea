"""The block pool never loses, doubles or leaks a block, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lexshard.actors.kv_cache import BlockPool, OutOfBlocksError, block_hash


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share, grow and go in any order; every block has exactly one state."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.holders: list[list[int]] = []
        self.names = 0

    @rule(blocks=st.integers(1, 5), publish=st.booleans())
    def allocate(self, blocks: int, publish: bool) -> None:
        if blocks > self.pool.available:
            return
        taken = [self.pool.allocate() for _ in range(blocks)]
        in_use = {block for holder in self.holders for block in holder}
        assert in_use.isdisjoint(taken)
        if publish:
            for block in taken:
                self.names += 1
                self.pool.publish(block, self.names.to_bytes(4, "big"))
        self.holders.append(taken)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        name = data.draw(st.integers(1, self.names)).to_bytes(4, "big")
        block = self.pool.find(name)
        if block is not None:
            self.pool.share(block)
            self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.used == len({block for holder in self.holders for block in holder})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_least_recently_used_cached_block_goes_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([second])
    pool.release([first])
    assert pool.allocate() == second
    assert pool.find(b"second") is None
    assert pool.find(b"first") == first


def test_names_depend_on_everything_before() -> None:
    tail = list(range(16, 32))
    assert block_hash(block_hash(b"", range(16)), tail) != block_hash(
        block_hash(b"", range(1, 17)), tail
    )


def test_says_when_nothing_is_left_and_when_misused() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(OutOfBlocksError):
        pool.allocate()
    pool.release([block])
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([block])
    with pytest.raises(ValueError, match="kv-cache-memory"):
        BlockPool(0)
