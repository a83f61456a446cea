"""A step's rows lie where their sequences' blocks are, whatever is computed beside them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

from lexshard.actors.engine.step_batch import build_batch
from lexshard.actors.engine.step_plan import NO_ROWS, Chunk, StepPlan


def chunk_of(random: np.random.Generator, length: int, count: int) -> Chunk:
    """The last ``count`` of ``length`` tokens, in blocks of anywhere."""
    blocks = array("i", random.choice(10_000, -(-length // 16) + 1, replace=False).tolist())
    tokens = random.integers(0, 10_000, length).tolist()
    sequence: Any = SimpleNamespace(blocks=blocks, token_ids=tokens)
    return Chunk(sequence, length - count, count, 1, NO_ROWS)


def test_last_tokens_are_the_rows_that_they_are_beside_a_prompt() -> None:
    random = np.random.default_rng(1)
    last = [chunk_of(random, length, 1) for length in (1, 15, 16, 17, 300)]
    alone = build_batch(StepPlan(tuple(last)))
    beside = build_batch(StepPlan((*last, chunk_of(random, 40, 33))))
    for name in ("token_ids", "positions", "slots", "row_sequence", "output_rows"):
        own, among = getattr(alone, name), getattr(beside, name)
        np.testing.assert_array_equal(own, among[: len(last)], name)
        assert own.dtype == among.dtype
    widest = alone.block_tables.shape[1]
    np.testing.assert_array_equal(alone.block_tables, beside.block_tables[: len(last), :widest])
    for row, chunk in enumerate(last):
        block, place = divmod(chunk.start, 16)
        assert alone.slots[row] == 16 * chunk.sequence.blocks[block] + place
