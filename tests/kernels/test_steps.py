"""Several steps by one call: the very tokens and candidates of the calls that it replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.kernels import pool, steps
from lexshard.kernels.certified import Certified, Rows, certified_candidates
from lexshard.kernels.decision import decide_packed, pack
from lexshard.kernels.draw import Controls
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.llama import cpu as llama
from lexshard.kernels.quantize import quantize
from lexshard.kernels.search import block_slack
from lexshard.kernels.search.types import GREEDY, GUMBEL, MIN_P, TOP_K, Needs
from lexshard.kernels.steps import AskedRows, Places, StepsTaken, take_steps
from tests.support.draft_cases import random_stack

pytestmark = pytest.mark.vectors

VOCABULARY, STEPS, BLOCKS = 300, 20, 2
EVERY = VOCABULARY  # candidates
NEVER = np.array([VOCABULARY], np.int64)  # a stop that no row draws


def case(seed: int, rows: int, **kinds: Any) -> tuple[LlamaStack, Rows, AskedRows, Places, Any]:
    random = np.random.default_rng(seed)
    stack = random_stack(random, vocabulary=VOCABULARY, blocks=BLOCKS * rows, **kinds)
    table = stack.embedding
    if table.dtype == np.uint16:
        table = (table.astype(np.uint32) << 16).view(np.float32)
    tier = quantize(torch.from_numpy(3 * table), "int8")
    head = Rows.of(3 * table, tier, block_slack(tier.row_slack))
    searched = random.choice([GREEDY, GUMBEL, TOP_K, MIN_P], rows)
    hot = np.where(searched == GREEDY, 0.0, random.uniform(0.5, 2.0, rows).astype(np.float32))
    nucleus = np.where(searched == GUMBEL, random.choice([0.8, 1.0], rows), 1.0)
    controls = Controls(
        inverse_temperature=hot.astype(np.float64),
        top_k=np.where(searched == TOP_K, random.integers(1, 30, rows), 0),
        top_p=np.ones(rows),
        log_min_p=np.where(searched == MIN_P, -2.0, -np.inf),
        key=random.integers(0, 2**62, rows).astype(np.uint64),
        position=random.integers(0, 99, rows).astype(np.uint64),
    )
    adjustments = flatten_adjustments((None,) * rows)
    needs = Needs(
        searched,
        controls.top_k,
        controls.log_min_p,
        controls.key,
        controls.position,
        controls.inverse_temperature,
    )
    packed = pack(controls, adjustments)
    assert packed is not None
    asked = AskedRows(needs, adjustments, nucleus, packed)
    positions = np.repeat(np.arange(STEPS, dtype=np.int32)[:, None], rows, axis=1)
    tables = random.permutation(BLOCKS * rows).astype(np.int32).reshape(rows, BLOCKS)
    own = np.arange(rows, dtype=np.int32)
    slots = tables[own, positions // 16].astype(np.int64) * 16 + positions % 16
    tokens = random.integers(0, VOCABULARY, rows)
    return stack, head, asked, Places(positions, slots, own, tables), tokens


def one_by_one(
    stack: LlamaStack, head: Rows, asked: AskedRows, places: Places, tokens: Any
) -> tuple[list[list[int]], list[Certified], list[Any]]:
    """Tokens, candidates and hidden states of every step that can be decided so, and of the one
    that ended them the hidden states."""
    said, all_found, states = [], [], []
    needs, drawing = asked.needs, asked.drawing
    needs, noise = needs._replace(position=needs.position.copy()), drawing.noise.copy()
    stack = replace(stack, key_cache=stack.key_cache.copy(), value_cache=stack.value_cache.copy())
    for positions, slots in zip(places.positions, places.slots, strict=True):
        rows = stack.embedding[tokens]
        if rows.dtype == np.uint16:
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        rows = rows * np.float32(stack.shape.embedding_scale)
        hidden = np.empty((len(rows), stack.shape.hidden), np.float32)
        at = (positions, slots, places.rows, places.tables, places.rows)
        constants = (*stack.weights, *stack.shape.constants, stack.key_cache, stack.value_cache)
        llama.forward(*pool.team(), rows, *at, *constants, hidden)
        states.append(hidden)
        found = certified_candidates(hidden, head, needs, asked.adjustments, asked.top_p)
        if found is None or not found.members.all():
            break
        drawn = decide_packed(found.ids, found.raw, found.offsets, drawing._replace(noise=noise))
        tokens = drawn
        said.append(drawn.tolist())
        all_found.append(found)
        needs.position[:] += np.uint64(1)
        noise[1] += np.uint64(1)
    return said, all_found, states


def check(taken: StepsTaken, said: list[list[int]], found: list[Certified], rows: int) -> None:
    steps = len(taken.tokens)
    assert taken.tokens == said[:steps]
    for name in ("ids", "raw", "thresholds", "largest", "best", "members", "weighed"):
        expected = [getattr(each, name) for each in found[:steps]]
        np.testing.assert_array_equal(getattr(taken.found, name), np.concatenate(expected))
    widths = np.concatenate([np.diff(each.offsets) for each in found[:steps]])
    np.testing.assert_array_equal(np.diff(taken.found.offsets), widths)
    assert taken.found.leaders == sum(each.leaders for each in found[:steps])
    assert len(taken.found.members) == steps * rows


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 weights": {"half": True, "extras": True},
    "bfloat16": {"half": True, "arithmetic": "bfloat16"},
    "gemma": {"half": True, "gemma": True, "extras": True, "window": 9},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_the_tokens_and_candidates_of_steps_one_by_one(kind: str, rows: int) -> None:
    for seed in range(6):
        stack, head, asked, places, tokens = case(seed, rows, **KINDS[kind])
        said, found, states = one_by_one(stack, head, asked, places, tokens)
        before = asked.needs.position.copy(), asked.drawing.position.copy()
        pool.set_threads(1 + seed % 3)
        try:
            taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY)
        finally:
            pool.set_threads(1)
        assert taken.body_seconds > 0
        assert len(taken.tokens) == len(said)
        if taken.tokens:
            check(taken, said, found, rows)
        # Whoever goes on, goes on from the place behind them, with what is computed already.
        for old, now in zip(before, (asked.needs.position, asked.drawing.position), strict=True):
            np.testing.assert_array_equal(now, old + np.uint64(len(said)))
        assert (taken.hidden is None) == (len(said) == STEPS)
        if taken.hidden is not None:
            np.testing.assert_array_equal(taken.hidden, states[-1])
            ended = certified_candidates(states[-1], head, asked.needs, *asked[1:3])
            assert taken.left is not None
            assert ended is not None
            for ours, theirs in zip(taken.left, ended, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_steps_end_behind_a_stop_and_before_too_many_candidates() -> None:
    stack, head, asked, places, tokens = case(3, 2)
    said, found, states = one_by_one(stack, head, asked, places, tokens)
    assert len(said) == STEPS

    def again(stops: Any, most: int) -> StepsTaken:
        stack, head, asked, places, tokens = case(3, 2)
        return take_steps(stack, head, asked, places, tokens, stops, most)

    stop = said[4][1]
    first = next(step for step, drawn in enumerate(said) if stop in drawn)
    ended = again(np.array([VOCABULARY, stop]), EVERY)
    assert len(ended.tokens) == first + 1
    assert ended.hidden is None
    check(ended, said, found, 2)
    widths = [int(np.diff(each.offsets).max()) for each in found]
    few = again(NEVER, max(widths) - 1)
    assert len(few.tokens) == widths.index(max(widths))
    np.testing.assert_array_equal(few.hidden, states[len(few.tokens)])
    assert few.left is None  # it may be all rows


def test_steps_end_where_there_is_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And go on where they ended."""
    stack, head, asked, places, tokens = case(3, 2)
    said, found, _ = one_by_one(stack, head, asked, places, tokens)
    monkeypatch.setattr(steps, "MOST", sum(len(each.ids) for each in found[:7]))
    taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY)
    assert len(taken.tokens) == 7
    check(taken, said, found, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_states_that_mean_nothing_end_them(value: float) -> None:
    stack, head, asked, places, tokens = case(5, 1)
    stack.weights.final_norm[3] = value
    taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY)
    assert taken.tokens == []
    assert len(taken.found.ids) == 0
    assert taken.hidden is not None
    assert taken.left is None
