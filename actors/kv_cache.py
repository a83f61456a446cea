"""Which KV blocks belong to whom: allocation, sharing and the prefix cache.

Only bookkeeping lives here; keys and values themselves belong to the body. A block holds 16
tokens. A full block is immutable and named by a hash of every token up to its end, so sequences
with a common prefix share it without a copy. Blocks not in use stay findable, least recently
used first out, until their memory is wanted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lexshard.kernels.attention import BLOCK_SIZE

BLOCK_TOKENS = BLOCK_SIZE

BlockHash = bytes


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of a full block: a digest of its tokens and of the name of the block before it."""
    words = np.asarray(token_ids, dtype=np.int32).tobytes()
    return hashlib.blake2b(parent + words, digest_size=16).digest()


def first_parent(cache_salt: str) -> BlockHash:
    """What the first block of a sequence has for the name before it: sequences of different salts
    have no block name in common."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"cache salt").digest()


class OutOfBlocksError(RuntimeError):
    """No KV block is free; the caller preempts a sequence or waits."""


@dataclass(slots=True)
class _Block:
    users: int = 0
    name: BlockHash | None = None


class BlockPool:
    """``count`` blocks, each free, in use (by one or more sequences) or cached (findable, unused).

    Raises ValueError if there is no block at all.
    """

    def __init__(self, count: int, *, prefix_cache: bool = True) -> None:
        if count < 1:
            raise ValueError("the KV cache needs at least one block; raise --kv-cache-memory")
        self.count = count
        self._prefix_cache = prefix_cache
        self._blocks = [_Block() for _ in range(count)]
        self._free: deque[int] = deque(range(count))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_name: dict[BlockHash, int] = {}

    @property
    def shares_prefixes(self) -> bool:
        return self._prefix_cache

    @property
    def available(self) -> int:
        """Blocks an allocation can have: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.count - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def allocate(self) -> int:
        """A block for new tokens. Raises OutOfBlocksError."""
        if self._free:
            index = self._free.popleft()
        elif self._cached:
            index, _ = self._cached.popitem(last=False)
            self._forget(index)
        else:
            raise OutOfBlocksError("every KV block is in use")
        self._blocks[index].users = 1
        return index

    def find(self, name: BlockHash) -> int | None:
        """The block of that name, if it is still there; does not take hold of it."""
        return self._by_name.get(name)

    def share(self, index: int) -> None:
        """Take hold of a block found by name."""
        block = self._blocks[index]
        if block.users == 0:
            del self._cached[index]
        block.users += 1

    def publish(self, index: int, name: BlockHash) -> None:
        """Make a full, computed block findable. The first of two equal blocks keeps the name."""
        if self._prefix_cache and name not in self._by_name:
            self._blocks[index].name = name
            self._by_name[name] = index

    def release(self, indices: Sequence[int]) -> None:
        """Let go of a sequence's blocks, its last first, so that shared beginnings live longest."""
        for index in reversed(indices):
            block = self._blocks[index]
            if block.users < 1:
                raise RuntimeError(f"KV block {index} was released more often than it was taken")
            block.users -= 1
            if block.users == 0:
                if block.name is None:
                    self._free.append(index)
                else:
                    self._cached[index] = None

    def drop_cache(self) -> None:
        """Forget every unused cached block."""
        for index in self._cached:
            self._forget(index)
            self._free.append(index)
        self._cached.clear()

    def check(self) -> None:
        """Raise RuntimeError unless every block is in exactly one state (run when idle)."""
        in_use = sum(block.users > 0 for block in self._blocks)
        states = len(self._free) + len(self._cached) + in_use
        if states != self.count or len(set(self._free) | set(self._cached)) != self.available:
            raise RuntimeError(
                f"KV blocks do not add up: {len(self._free)} free, {len(self._cached)} cached, "
                f"{in_use} in use, {self.count} in all"
            )

    def _forget(self, index: int) -> None:
        block = self._blocks[index]
        if block.name is not None:
            del self._by_name[block.name]
            block.name = None
