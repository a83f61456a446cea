"""The Llama stack in one call: the reference's hidden states, and a row's bits are its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lexshard.kernels import pool
from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.kernels.linear import Arithmetic, compact
from lexshard.kernels.linear.compact import compacted, stacked
from lexshard.kernels.llama import LlamaStack, cpu, reference
from lexshard.kernels.processor import sums_as_matrices
from tests.support.draft_cases import random_stack

pytestmark = pytest.mark.vectors

TABLE = np.array([5, 1, 9, 3, 7, 0, 11, 2], np.int32)
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 300, 117)]
ARITHMETIC = pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])


def stack_of(seed: int, arithmetic: Arithmetic) -> LlamaStack:
    random = np.random.default_rng(seed)
    extras, window, gemma = seed % 2 == 1, 20 if seed > 1 else 0, seed > 3
    return random_stack(
        random, half=True, window=window, extras=extras, gemma=gemma, arithmetic=arithmetic
    )


def forward(stack: LlamaStack, start: int, stop: int) -> np.ndarray:
    """Hidden states of the tokens from ``start`` to ``stop - 1``; those before are in the cache."""
    positions = np.arange(start, stop, dtype=np.int32)
    out = np.empty((stop - start, stack.shape.hidden), np.float32)
    cpu.forward(
        *pool.team(),
        reference.embed(stack, TOKENS[start:stop]).astype(np.float32),
        positions,
        TABLE[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        np.zeros(stop - start, np.int32),
        TABLE[None],
        np.arange(stop - start, dtype=np.int32),
        *stack.weights,
        *stack.shape.constants,
        stack.key_cache,
        stack.value_cache,
        out,
    )
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("arithmetic", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_agrees_with_the_reference(seed: int, arithmetic: Arithmetic, limit: float) -> None:
    """Of bfloat16 a value between two may go either way, and then others do; on the whole they are
    as near as one rounding."""
    found = forward(stack_of(seed, arithmetic), 0, len(TOKENS))
    expected = reference.forward(stack_of(seed, arithmetic), TOKENS, 0, TABLE)
    difference = np.abs(found - expected) / np.abs(expected).max()
    assert difference.max() < limit
    assert np.sqrt((difference**2).mean()) < limit / 10


@ARITHMETIC
@pytest.mark.parametrize("seed", [1, 5])
def test_a_row_has_the_same_bits_in_chunks_of_any_size(seed: int, arithmetic: Arithmetic) -> None:
    whole = forward(stack_of(seed, arithmetic), 0, len(TOKENS))
    stack, done = stack_of(seed, arithmetic), 0
    for size in (1, 50, 2, 49, 3, 12):
        stop = min(done + size, len(TOKENS))
        np.testing.assert_array_equal(forward(stack, done, stop), whole[done:stop])
        done = stop
    assert done == len(TOKENS)


def test_bfloat16_rounds_what_is_multiplied_and_nothing_more() -> None:
    exact, rounded = (forward(stack_of(0, each), 0, 40) for each in ("float32", "bfloat16"))
    assert not np.array_equal(exact, rounded)
    assert np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


@ARITHMETIC
@pytest.mark.parametrize("seed", [3, 5])
def test_a_row_has_the_same_bits_by_any_number_of_threads(
    seed: int, arithmetic: Arithmetic
) -> None:
    """Few rows are shared by panels and heads, many by rows; some threads have nothing to do."""
    sizes = (1, 4, 40, 2, 70)
    expected: list[np.ndarray] = []
    try:
        for threads in (1, 2, 3, 4, 7):
            pool.set_threads(threads)
            stack, done, found = stack_of(seed, arithmetic), 0, []
            for size in sizes:
                found.append(forward(stack, done, done + size))
                done += size
            caches = [stack.key_cache.view(np.uint8), stack.value_cache.view(np.uint8)]
            expected = expected or [*found, *caches]
            for ours, theirs in zip([*found, *caches], expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    finally:
        pool.set_threads(1)


@pytest.mark.skipif(sums_as_matrices(), reason="words are summed in another order there")
@pytest.mark.parametrize("seed", range(6))
def test_compact_weights_give_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread and by three, which take an odd number of panels each."""
    monkeypatch.setattr(compact, "WORTH", 2.0)
    plain = stack_of(seed, "bfloat16").weights
    names = ("qkv", "attention_output", "gate_up", "down")
    made = {name: stacked(map(compacted, getattr(plain, name))) for name in names}
    assert all(each is not None for each in made.values())
    try:
        for threads in (1, 3):
            pool.set_threads(threads)
            stack = stack_of(seed, "bfloat16")
            small = replace(stack_of(seed, "bfloat16"), weights=plain._replace(**made))
            done = 0
            for size in (1, 4, 40, 2, 70):
                expected, found = (forward(each, done, done + size) for each in (stack, small))
                np.testing.assert_array_equal(found, expected)
                done += size
    finally:
        pool.set_threads(1)
    expected = reference.forward(stack_of(seed, "bfloat16"), TOKENS, 0, TABLE)
    small = replace(stack_of(seed, "bfloat16"), weights=plain._replace(**made))
    np.testing.assert_array_equal(reference.forward(small, TOKENS, 0, TABLE), expected)
