"""How far to guess: where it pays, and never where it does not."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.drafter.acceptance_history import FIRST_ACCEPTANCE, AcceptanceHistory
from lexshard.actors.drafter.cost_curve import CostCurve
from lexshard.actors.drafter.length import (
    LEAST_GAIN,
    FixedLength,
    MeasuredLength,
    SteppingLength,
    best_lengths,
)


def curve(points: dict[int, float]) -> CostCurve:
    known = CostCurve()
    for size, seconds in points.items():
        known.observe(size, seconds)
    return known


def tokens_per_second(
    acceptance: list[float], lengths: tuple[int, ...], step: CostCurve, draft_step: CostCurve
) -> float:
    """The definition: expected tokens over expected seconds."""
    tokens = sum(
        sum(a**n for n in range(length + 1)) for a, length in zip(acceptance, lengths, strict=True)
    )
    seconds = step.estimate(len(acceptance) + sum(lengths))
    return tokens / (seconds + max(lengths) * draft_step.estimate(len(acceptance)))


@given(
    st.lists(st.floats(0.05, 0.99), min_size=1, max_size=3),
    st.floats(0.0, 3.0),
    st.floats(0.001, 1.0),
)
def test_no_other_lengths_give_more_tokens_a_second(
    acceptance: list[float], slope: float, draft_seconds: float
) -> None:
    """Against every combination of lengths up to 3."""
    step = curve({1: 1.0, 2: 1.0 + slope / 4, 16: 1.0 + 4 * slope})
    draft_step = curve({1: draft_seconds})
    chosen = best_lengths(acceptance, 3, step, draft_step)
    best = max(
        tokens_per_second(acceptance, lengths, step, draft_step)
        for lengths in product(range(4), repeat=len(acceptance))
    )
    plain = tokens_per_second(acceptance, (0,) * len(acceptance), step, draft_step)
    found = tokens_per_second(acceptance, tuple(chosen), step, draft_step)
    if any(chosen):
        assert found == pytest.approx(best)
        assert found > LEAST_GAIN * plain
    else:
        assert best <= LEAST_GAIN * plain * (1 + 1e-12)


def test_how_often_there_are_guesses_says_whether_they_pay_and_not_how_many() -> None:
    """A look-up that finds something in one step of six, which then stands."""
    rule = MeasuredLength(5)
    for rows in (1, 2, 6):
        rule.step_took(rows, 1.0 + (rows - 1) / 10)
    rule.drafting_took(1, 1, 0.001)
    chosen = []
    for step in range(600):
        [length] = rule.lengths([1], [9])
        chosen.append(length)
        if length:
            rule.heard(1, *((length, length) if step % 6 == 0 else (0, 0)))
    assert chosen[300:].count(5) > 200


def test_costs_between_two_sizes_lie_between_them_and_pauses_count_little() -> None:
    known = curve({2: 1.0, 4: 3.0})
    assert known.estimate(3) == pytest.approx(2.0)
    assert known.estimate(1) == 1.0
    assert known.estimate(8) == pytest.approx(6.0)
    for _ in range(20):
        known.observe(2, 1.0)
    known.observe(2, 100.0)
    assert known.estimate(2) <= 1.5


def test_what_became_slower_at_one_size_is_taken_to_have_become_slower_at_all() -> None:
    known = curve({16: 6.0, 48: 16.0})
    for _ in range(30):
        known.observe(16, 6.0)
        known.observe(48, 16.0)
    for _ in range(100):
        known.observe(16, 9.0)
    assert known.estimate(16) == pytest.approx(9.0)
    assert 20 < known.estimate(48) < 24


def test_a_sequence_is_an_average_one_until_it_has_shown_otherwise() -> None:
    history = AcceptanceHistory()
    assert history.of(1) == FIRST_ACCEPTANCE
    for _ in range(200):
        history.add(1, 5, 5)
        history.add(2, 5, 0)
    assert history.of(1) > 0.9
    assert history.of(2) < 0.15
    assert history.of(1) > history.of(3) > history.of(2)
    history.pause([2], 400)
    assert history.of(2) == pytest.approx(history.of(3), abs=0.05)  # tried again
    history.forget(1)
    assert history.of(1) == history.of(3)


def test_who_draws_is_not_taken_for_one_who_writes_greedily() -> None:
    """Nor forgotten while guesses go on for the other kind alone."""
    history = AcceptanceHistory()
    history.meet(1, greedy=True)
    history.meet(3, greedy=True)
    for _ in range(200):
        history.add(1, 5, 5)
        history.add(2, 5, 0)
    assert history.of(3) > 0.9
    assert history.of(4) < 0.15
    history.pause([2], 4000, others=[1])
    assert history.of(4) > 0.8  # what may have changed since
    assert history.of(3) > 0.9
    history.forget(3)
    assert history.of(3) == history.of(4)


def test_a_drafter_of_which_nothing_is_known_is_tried() -> None:
    """Guesses that pay if nine of ten stand, and do not if half of them do."""
    for share, guessed in ((0.9, True), (0.5, False)):
        random = np.random.default_rng(2)
        rule = MeasuredLength(5)
        for rows in (1, 2, 4, 6):
            rule.step_took(rows, 1.0 + 0.2 * rows)
        rule.drafting_took(1, 1, 0.25)
        lengths = []
        for step in range(6000):
            [length] = rule.lengths([step // 100], [99])
            lengths.append(length)
            if length:
                stood = int(random.geometric(1.0 - share)) - 1
                rule.heard(step // 100, length, min(stood, length))
        guessing = np.count_nonzero(lengths) / len(lengths)
        assert (guessing > 0.9) if guessed else (0 < guessing < 0.05)


def test_the_papers_rule_adds_two_and_takes_one() -> None:
    rule = SteppingLength(6, 3)
    assert rule.lengths([1], [9]) == [3]
    rule.heard(1, 3, 3)
    assert rule.lengths([1], [9]) == [5]
    rule.heard(1, 5, 2)
    assert rule.lengths([1, 2], [9, 9]) == [4, 3]
    rule.heard(1, 1, 1)  # there was room for one only
    assert rule.lengths([1], [2]) == [2]
    for _ in range(9):
        rule.heard(1, rule.lengths([1], [9])[0], 0)
    assert rule.lengths([1], [9]) == [1]
    rule.forget(1)
    assert rule.lengths([1], [9]) == [3]


@pytest.mark.parametrize("rule", [FixedLength(5), SteppingLength(5, 3), MeasuredLength(5)])
def test_no_rule_goes_beyond_the_room_there_is(rule: FixedLength) -> None:
    for room in range(4):
        assert rule.lengths([1, 2], [room, 0])[0] <= room
        assert rule.lengths([1, 2], [room, 0])[1] == 0


def test_measured_lengths_follow_acceptance_and_stop_where_guessing_does_not_pay() -> None:
    rule = MeasuredLength(5)
    for rows in (1, 2, 4, 8):
        rule.step_took(rows, 1.0 + 0.1 * rows)
    rule.drafting_took(1, 2, 0.1)

    def after(stands: bool) -> int:
        for _ in range(60):
            [length] = rule.lengths([1], [99])
            if length:
                rule.heard(1, length, length if stands else 0)
        return rule.lengths([1], [99])[0]

    assert after(stands=True) == 5
    assert after(stands=False) <= 1
    for _ in range(60):
        rule.drafting_took(1, 1, 50.0)  # so slow a drafter is no help
    for _ in range(9):
        assert after(stands=True) == 0


def test_what_did_not_pay_is_tried_again_now_and_then_however_many_ask() -> None:
    """Every time they all must first be caught up with: sixteen are not forgotten faster."""
    begun = {}
    for count in (1, 16):
        random = np.random.default_rng(count)
        rule = MeasuredLength(5)
        for rows in (1, 2, 4, 6):
            rule.step_took(rows * count, 1.0 + 0.2 * rows)
        rule.drafting_took(count, 1, 0.05)
        names, rooms, before = range(count), [99] * count, False
        begun[count] = 0
        for _ in range(6000):
            lengths = rule.lengths(names, rooms)
            for name, length in zip(names, lengths, strict=True):
                if length:
                    stood = int(random.geometric(0.7)) - 1  # 0.3 of all guesses stand
                    rule.heard(name, length, min(stood, length))
            begun[count] += any(lengths) and not before
            before = any(lengths)
    assert 0 < begun[16] <= 10
    assert 0 < begun[1] <= 20


def test_guessing_does_not_begin_where_little_is_left_to_say() -> None:
    """The drafter would first have to read what has been said: as long as twenty tokens take."""

    def begins(room: int) -> bool:
        rule = MeasuredLength(5)
        for rows in (1, 2, 4, 6):
            rule.step_took(rows, 1.0 + 0.1 * rows)
        rule.drafting_took(1, 1, 0.05)
        rule.beginning_took(1, 22.0)
        return rule.lengths([1], [room]) != [0]

    assert [begins(room) for room in (5, 20, 40, 400)] == [False, False, False, True]


def test_more_never_looks_cheaper_than_less() -> None:
    """What was seen once, long ago and in a bad moment gives way to what is seen all the time."""
    known = curve({1: 1.0, 16: 10.0, 18: 7.0})
    assert known.estimate(16) == known.estimate(18) == pytest.approx(8.5, rel=0.01)
    for _ in range(40):
        known.observe(18, 7.0)
    assert known.estimate(16) == known.estimate(18) == pytest.approx(7.1, abs=0.2)
    assert known.estimate(1) == pytest.approx(1.0, abs=0.05)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10.0), min_size=1, max_size=12))
def test_estimates_grow_with_the_size_and_keep_what_already_does(points: dict[int, float]) -> None:
    known = curve(points)
    estimates = [known.estimate(size) for size in range(1, 65)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(estimates))
    ordered = dict(zip(sorted(points), sorted(points.values()), strict=True))
    for size, seconds in ordered.items():
        assert curve(ordered).estimate(size) == pytest.approx(seconds)


def test_what_has_become_cheap_is_found_out_though_it_is_never_done() -> None:
    """A size that looked dear when the machine was busy: now and then one guess more is tried."""
    rule = MeasuredLength(5)
    costs = {1: 1.0, 2: 1.1, 3: 9.0, 4: 9.0, 5: 9.0, 6: 9.0}
    for rows, seconds in costs.items():
        for _ in range(4):
            rule.step_took(rows, seconds)
    rule.drafting_took(1, 1, 0.02)
    lengths = []
    for _ in range(3000):
        [length] = rule.lengths([1], [99])
        lengths.append(length)
        rule.heard(1, length, length)
        rule.step_took(1 + length, 1.0 + 0.1 * length)
    assert set(lengths[:50]) == {0, 1}  # what all is compared with is tried, too
    assert lengths.count(5) > 500
    assert lengths[-50:].count(5) > 40


def test_what_plain_steps_have_become_is_found_out_though_guesses_go_on() -> None:
    """A warm-up had them as dear as steps with guesses, which thus seemed to pay."""
    rule = MeasuredLength(5)
    for rows in range(1, 7):
        rule.step_took(rows, 2.0 + 0.1 * rows)
    rule.drafting_took(1, 1, 0.3)
    random = np.random.default_rng(5)
    lengths = []
    for step in range(300):
        [length] = rule.lengths([step // 50], [99])
        lengths.append(length)
        if length:
            rule.heard(step // 50, length, min(int(random.geometric(0.4)) - 1, length))
        # Those without guesses are taken in runs, in which each takes half as long.
        rule.step_took(1 + length, 2.0 + 0.1 * length if length else 1.0, 1 if length else 8)
    assert all(lengths[:24])
    assert not any(lengths[60:])


def test_of_a_run_every_step_counts() -> None:
    """So that what a kernel took to load is soon forgotten."""
    once, often = curve({1: 10.0}), curve({1: 10.0})
    once.observe(1, 1.0)
    often.observe(1, 1.0, 8)
    assert often.estimate(1) < 0.5 * once.estimate(1)
