"""What a device drafts follows from what its link and its guesses cost."""

from __future__ import annotations

import pytest

from lexshard.actors.edge.pace import FIRST_ALONE, MOST_ALONE, DraftPace, Pace


def learned(
    *,
    trip: float,
    draft: float = 0.001,
    bits: int = 14,
    rate: float = 1e5,
    acceptance: float = 0.8,
    alone: float = 0.0,
    thrift: float = 0.0,
) -> DraftPace:
    """After many batches over such a link."""
    pace = DraftPace(longest=16, thrift=thrift)
    pace.connected(trip)
    for count in range(1, 60):
        size = 1 + count % 8
        pace.drafted(size, size * draft, size * bits)
        pace.travelled(size * bits, trip + size * bits / rate)
        pace.heard(100, round(100 * acceptance))
        if alone:
            pace.drew(alone)
    return pace


def test_longer_ways_have_longer_batches() -> None:
    trips = 0.001, 0.01, 0.1, 1.0
    lengths = [learned(trip=trip, thrift=1.0).next().guesses for trip in trips]
    assert lengths == sorted(lengths)
    assert lengths[0] < 4
    assert lengths[-1] >= 10


def test_costly_guesses_that_seldom_stand_are_not_sent() -> None:
    """500 bits each at 10 kbit/s, to save 20 ms."""
    pace = learned(trip=0.02, bits=500, rate=1e4, acceptance=0.5, thrift=1.0)
    assert pace.next() == Pace(0)
    assert pace.ahead(1) == 0


def test_a_target_that_is_quicker_alone_goes_on_alone_unless_that_is_too_dear() -> None:
    quick = {"trip": 0.0999, "alone": 0.002}
    assert learned(**quick).next() == Pace(0, 100)
    assert learned(**quick).lead > 50
    assert learned(**quick, thrift=1.0).next().alone == 0
    slow = learned(trip=0.05, alone=0.05)
    assert slow.next().guesses > 4
    assert slow.next().alone == 0
    assert learned(trip=1.0, alone=0.001).next() == Pace(0, MOST_ALONE)


def test_a_target_of_which_nothing_is_known_goes_on_alone_unless_that_is_too_dear() -> None:
    """So a first text waits for one answer; then what came counts."""
    pace, thrifty = (DraftPace(longest=16, thrift=thrift) for thrift in (0.1, 1.0))
    for each in (pace, thrifty):
        each.connected(0.1)
    assert (pace.next(), thrifty.next().alone) == (Pace(0, FIRST_ALONE), 0)
    pace.drew(0.002)
    assert pace.next() == Pace(0, 100)
    for _ in range(20):
        pace.drew(0.05)
    assert pace.next().guesses > 0


def test_what_is_unlikely_to_be_of_use_is_not_drafted_ahead() -> None:
    likely = learned(trip=0.1, acceptance=0.95, thrift=0.2)
    unlikely = learned(trip=0.1, acceptance=0.3, thrift=0.2)
    assert likely.ahead(4) > 4
    assert unlikely.ahead(4) == 0


def test_the_round_trip_is_told_apart_from_the_bits() -> None:
    pace = learned(trip=0.1, bits=500, rate=1e4)
    assert pace.round_trip == pytest.approx(0.1)


def test_a_draft_that_took_long_once_is_tried_again() -> None:
    """A compilation, a busy moment: no guesses for a while, but not for ever."""
    pace = learned(trip=0.05, thrift=1.0)
    pace.drafted(1, 60.0, 14)
    assert pace.next().guesses == 0
    assert any(pace.next().guesses > 0 for _ in range(100))


def test_guesses_that_did_not_pay_are_tried_again_while_the_target_draws_alone() -> None:
    pace = learned(trip=0.05, alone=0.03, acceptance=0.0)
    assert pace.next().guesses == 0
    for _ in range(400):  # as many guesses were tested as hardly any text has
        pace.drew(0.03)
    assert pace.next().guesses > 0


def test_one_answer_that_took_long_stops_no_drafts() -> None:
    pace = DraftPace(longest=16, thrift=1.0)
    pace.connected(0.06)
    pace.drafted(4, 0.004, 4 * 436)
    pace.travelled(4 * 436, 5.0)
    assert pace.next().guesses > 0
