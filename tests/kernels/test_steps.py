"""Several steps by one call: the very tokens and candidates of the calls that it replaces."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.head.screens import DenseScreen
from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.kernels import linear, pool, steps
from lexshard.kernels.certified import Certified, Rows, certified_candidates
from lexshard.kernels.decision import decide_packed, pack
from lexshard.kernels.draw import Controls
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.llama import cpu as llama
from lexshard.kernels.quantize import quantize
from lexshard.kernels.search import block_slack
from lexshard.kernels.search.types import GREEDY, GUMBEL, MIN_P, TOP_K, Needs
from lexshard.kernels.steps import (
    ENDS,
    FOLLOWING,
    GOES_ON,
    MASKS_COME,
    NO_MASKS,
    AskedRows,
    Places,
    StepsTaken,
    no_caller,
    take_steps,
)
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
    wide = torch.from_numpy(3 * table)
    tier = quantize(wide, "int4") if seed % 2 else quantize(wide, "int8")
    panels, dense = linear.pack(wide, half=False).panels, DenseScreen(wide, None).slack
    head = Rows.of(3 * table, tier, block_slack(tier.row_slack), panels, dense)
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
    tables = random.permutation(BLOCKS * rows).astype(np.int32).reshape(rows, BLOCKS)
    tokens = random.integers(0, VOCABULARY, rows)
    return stack, head, asked, Places(STEPS, np.zeros(rows, np.int64), tables), tokens


class Masking:
    """Answers a call, whose odd rows draw under another mask in each step: notes what it is told,
    ends the steps behind the one that is its ``last``, and is late with the masks of one. Masks
    ``come`` when they are asked for, or are there with the answer."""

    def __init__(
        self,
        random: np.random.Generator,
        rows: int,
        last: int = STEPS,
        late: int = STEPS,
        come: bool = True,
    ) -> None:
        words, odd = -(-VOCABULARY // 64), np.arange(rows) % 2 == 1
        every = random.integers(0, 2**63, (STEPS + 1, odd.sum(), words)).astype(np.uint64)
        # Wide ones, of half of the tokens, and ones with a few.
        self.every = np.where(random.random(every.shape) < 0.3, every, every & (every >> 7) & 31)
        self.every[:, :, 0] |= np.uint64(1)
        self._last, self._late, self.heard = last, late, list[list[int]]()
        self._follows = MASKS_COME if come else GOES_ON
        self.forced: tuple[Any, Any] | None = None  # how many must follow by step, and which
        self._function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(self._answer)
        address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        numbers = np.where(odd, np.cumsum(odd) - 1, -1)
        masked = self._follows if odd.any() else NO_MASKS
        masks = np.zeros_like(self.every[0]) if come else self.every[0].copy()
        own = no_caller(rows)._replace(answering=address, masked=masked)
        self.caller = own._replace(masks=masks, rows=numbers)

    def _answer(self, question: int) -> int:
        if question == FOLLOWING:
            if self.forced is not None:
                lengths, behind = self.forced
                self.caller.lengths[:] = lengths[len(self.heard)]
                self.caller.behind[:] = behind[len(self.heard)]
            self.heard.append(self.caller.told.tolist())
            if self._follows == GOES_ON:
                self.caller.masks[:] = self.every[len(self.heard)]
            return self._follows if len(self.heard) <= self._last else ENDS
        self.caller.masks[:] = self.every[len(self.heard)]
        return ENDS if len(self.heard) == self._late else GOES_ON

    def over(self, asked: AskedRows, step: int) -> AskedRows:
        """What is asked in a step."""
        own = self.caller._replace(masks=self.every[step])
        return asked._replace(adjustments=own.over(asked.adjustments))


def one_by_one(
    stack: LlamaStack,
    head: Rows,
    asked: AskedRows,
    places: Places,
    tokens: Any,
    masking: Masking | None = None,
) -> tuple[list[list[int]], list[Certified], list[Any]]:
    """Tokens, candidates and hidden states of every step that can be decided so, and of the one
    that ended them the hidden states."""
    said, all_found, states = [], [], []
    needs, drawing = asked.needs, asked.drawing
    needs, noise = needs._replace(position=needs.position.copy()), drawing.noise.copy()
    stack = replace(stack, key_cache=stack.key_cache.copy(), value_cache=stack.value_cache.copy())
    own_rows = np.arange(len(tokens), dtype=np.int32)
    for step in range(places.steps):
        positions = (places.first + step).astype(np.int32)
        slots = places.tables[own_rows, positions // 16].astype(np.int64) * 16 + positions % 16
        rows = stack.embedding[tokens]
        if rows.dtype == np.uint16:
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        rows = rows * np.float32(stack.shape.embedding_scale)
        hidden = np.empty((len(rows), stack.shape.hidden), np.float32)
        at = (positions, slots, own_rows, places.tables, own_rows)
        constants = (*stack.weights, *stack.shape.constants, stack.key_cache, stack.value_cache)
        llama.forward(*pool.team(), rows, *at, *constants, hidden)
        states.append(hidden)
        own = asked if masking is None else masking.over(asked, len(said))
        found = certified_candidates(hidden, head, needs, own.adjustments, own.top_p)
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
    for name in {*Certified._fields} - {"offsets", "leaders"}:
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


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_draw_under_the_masks_that_the_caller_has_for_each_step(rows: int) -> None:
    for seed, come in itertools.product(range(8), (True, False)):
        stack, head, asked, places, tokens = case(seed, rows)
        masking = Masking(np.random.default_rng(seed), rows, come=come)
        said, found, states = one_by_one(stack, head, asked, places, tokens, masking)
        taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY, masking.caller)
        assert len(taken.tokens) == len(said)
        if taken.tokens:
            check(taken, said, found, rows)
        assert masking.heard == said[: STEPS - 1]  # nothing follows the last
        if taken.hidden is not None:
            np.testing.assert_array_equal(taken.hidden, states[-1])
        for tokens_of_step, masks in zip(taken.tokens, masking.every, strict=False):
            for mask, token in zip(masks, tokens_of_step[1::2], strict=True):
                assert mask[token // 64] >> np.uint64(token % 64) & np.uint64(1)


def test_tokens_that_must_follow_are_computed_with_those_that_they_follow() -> None:
    """As if each of them had been drawn in a step of its own."""
    for seed, rows in itertools.product(range(4), (1, 3)):
        stack, head, asked, places, tokens = case(seed, rows)
        random = np.random.default_rng(seed)
        places = places._replace(steps=5)
        masking = Masking(random, rows)
        lengths = random.integers(0, 4, (STEPS, rows))
        behind = random.integers(0, VOCABULARY, (STEPS, rows, 3))
        caller = masking.caller._replace(behind=np.zeros((rows, 3), np.int64))
        masking.caller = caller = caller._replace(masked=max(caller.masked, GOES_ON))
        masking.forced = lengths, behind
        copies = {"key_cache": stack.key_cache.copy(), "value_cache": stack.value_cache.copy()}
        taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY, caller)
        at, drawn = places.first.copy(), tokens
        _, head, asked, _, _ = case(seed, rows)
        own = replace(stack, **copies)
        for step, said in enumerate(taken.tokens):
            if step:
                for row in range(rows):  # but the last, which shares its step with the others
                    count = lengths[step - 1, row]
                    text = [drawn[row], *behind[step - 1, row, :count]]
                    for token in text[:-1]:
                        one = Places(1, at[row : row + 1], places.tables[row : row + 1])
                        computed(own, one, np.array([token]))
                        at[row] += 1
                    drawn[row] = text[-1]
                    asked.needs.position[row] += np.uint64(count)
                    asked.drawing.noise[1, row] += np.uint64(count)
            at_once = places._replace(steps=1, first=at)
            masked = masking.over(asked, step)
            again = take_steps(own, head, masked, at_once, drawn, NEVER, EVERY)
            assert again.tokens == [said]
            at += 1
            drawn = np.array(said)
        assert taken.tokens


def computed(stack: LlamaStack, places: Places, tokens: Any) -> None:
    """The keys and values of one token are in the cache."""
    head = case(0, 1)[1]
    take_steps(stack, head, case(0, 1)[2], places, tokens, NEVER, 0)


def test_steps_end_where_the_caller_says_so_or_has_no_masks() -> None:
    def again(**ends: int) -> tuple[StepsTaken, Masking, list[list[int]], list[Any]]:
        stack, head, asked, places, tokens = case(3, 2)
        masking = Masking(np.random.default_rng(3), 2, **ends)
        said, _, states = one_by_one(stack, head, asked, places, tokens, masking)
        taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY, masking.caller)
        return taken, masking, said, states

    taken, masking, said, _ = again(last=4)
    assert len(said) > 6
    assert taken.tokens == masking.heard == said[:5]
    assert taken.hidden is None
    taken, masking, said, states = again(late=4)
    assert taken.tokens == masking.heard == said[:4]
    np.testing.assert_array_equal(taken.hidden, states[4])
    assert taken.left is None
    taken, masking, _, states = again(late=0)
    assert taken.tokens == masking.heard == []
    np.testing.assert_array_equal(taken.hidden, states[0])


@pytest.mark.parametrize("come", [True, False])
def test_steps_end_before_one_of_which_a_mask_holds_few_tokens(come: bool) -> None:
    ends = []
    for fewest in (0, 10, VOCABULARY):
        stack, head, asked, places, tokens = case(3, 2)
        masking = Masking(np.random.default_rng(3), 2, come=come)
        said, _, states = one_by_one(stack, head, asked, places, tokens, masking)
        held = [sum(int(word).bit_count() for word in mask) for [mask] in masking.every]
        few = [step for step, count in enumerate(held) if count <= fewest]
        caller = masking.caller._replace(fewest=fewest)
        taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY, caller)
        ends.append(min([*few, len(said)]))
        assert taken.tokens == said[: ends[-1]]
        if taken.hidden is not None:
            np.testing.assert_array_equal(taken.hidden, states[ends[-1]])
    assert len(said) == ends[0] > ends[1] > ends[2] == 0


def test_callers_without_masks_are_asked_after_a_while() -> None:
    for patience, times in ((0, STEPS - 1), (10**12, 0)):
        stack, head, asked, places, tokens = case(3, 1)
        masking = Masking(np.random.default_rng(3), 1)
        caller = masking.caller._replace(patience=patience)
        taken = take_steps(stack, head, asked, places, tokens, NEVER, EVERY, caller)
        assert len(taken.tokens) == STEPS
        assert len(masking.heard) == times


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
