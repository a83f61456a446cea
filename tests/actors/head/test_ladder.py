"""Which screen a step starts with, and when it starts elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head import calibration
from lexshard.actors.head.backoff import (
    LARGEST_AVERAGE,
    LONGEST_BACKOFF,
    SHORTEST_BACKOFF,
    Backoff,
    ShareLeft,
)
from lexshard.actors.head.calibration import Timing, calibrate, choose
from lexshard.actors.head.ladder import Choices, Ladder
from lexshard.actors.head.screens import DENSE
from lexshard.actors.head.shard import Shard
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.quantize import Tier, quantize
from tests.support.manual_clock import ManualClock


def _weight() -> torch.Tensor:
    return torch.randn(3000, 256, generator=torch.Generator().manual_seed(0))


def test_the_number_of_rows_decides() -> None:
    tiers = {"int8": quantize(_weight(), "int8")}
    ladder = Ladder(tiers, ((1, "int8"), (8, DENSE)))
    assert [ladder.choice(rows) for rows in (1, 7, 8, 100)] == ["int8", "int8", DENSE, DENSE]


@pytest.mark.parametrize("choices", [(), ((2, DENSE),), ((1, "int5"),)])
def test_a_ladder_without_a_first_rung_is_refused(choices: tuple) -> None:
    with pytest.raises(ValueError, match="ladder"):
        Ladder({}, choices)
    with pytest.raises(ValueError, match="ladder"):
        Ladder({}, ((1, DENSE),), choices)


def test_one_top_k_row_makes_a_step_one_of_several() -> None:
    weight = _weight()
    tiers: dict[str, Tier] = {"int4": quantize(weight, "int4"), "int8": quantize(weight, "int8")}
    one, several = ((1, "int4"),), ((1, "int4"), (2, "int8"))
    shard = Shard(weight, None, None, 1.0, 3000, ladder=Ladder(tiers, one, several))
    hidden = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))

    def used(*needs: Need) -> set[str]:
        states = hidden[: len(needs)]
        return {
            each.tier
            for each in shard.rescore(shard.screen(states, RowTable.of(needs))).certificates
        }

    greedy, top_k = Need("top1"), Need("topk", k=5)
    assert used(greedy, greedy) == {"int4"}
    assert used(top_k) == {"int4"}
    assert used(greedy, top_k) == {"int8"}
    shard.start_with(several)
    assert used(greedy, greedy) == {"int8"}
    shard.start_with(several, one)
    assert used(greedy, top_k) == {"int4"}


BY_ROWS = {  # milliseconds by rows and screen
    1: {DENSE: 3.0, "int4": 1.0, "int8": 2.0},
    2: {DENSE: 3.0, "int8": 2.0},
    4: {DENSE: 3.0, "int8": 4.0},
    8: {DENSE: 3.0},
}
# As timed for 262,144 tokens: what is as good for four rows takes twice the time for eight.
CROSSING = {4: {"int4": 19.1, "int8": 18.6}, 8: {"int4": 39.9, "int8": 17.1}}
BARELY_FASTER = {1: {"int8": 1.0, DENSE: 2.0}, 2: {"int8": 2.0, DENSE: 1.9}}


@pytest.mark.parametrize(
    ("taken", "certified", "expected"),
    [
        (BY_ROWS, False, ((1, "int4"), (2, "int8"), (4, DENSE))),
        (BY_ROWS, True, ((1, "int4"), (2, "int8"))),
        (BARELY_FASTER, False, ((1, "int8"),)),
        ({1: {"int4": 12.5, "int8": 20.4}} | CROSSING, True, ((1, "int4"), (5, "int8"))),
    ],
)
def test_the_fastest_is_chosen_and_dense_only_where_allowed(
    taken: dict[int, dict[str, float]], certified: bool, expected: Choices
) -> None:
    timings = [
        Timing("one", rows, screen, milliseconds, 0.0)
        for rows, each in taken.items()
        for screen, milliseconds in each.items()
    ]
    assert choose(timings, certified=certified)[0] == expected


def test_top_k_has_a_choice_of_its_own() -> None:
    timings = [
        Timing("one", 1, "int4", 1.0, 0.0),
        Timing("one", 1, "int8", 2.0, 0.0),
        Timing("several", 1, "int4", 3.0, 0.0),
        Timing("several", 1, "int8", 2.0, 0.0),
    ]
    assert choose(timings, certified=True) == (((1, "int4"),), ((1, "int8"),))


def test_backoff_grow_while_failures_follow_each_other() -> None:
    backoff = Backoff()
    lengths = []
    for _ in range(9):
        assert backoff.allows("int4")
        backoff.record("int4", failed=True)
        length = 0
        while not backoff.allows("int4"):
            length += 1
        lengths.append(length)
    assert lengths[:3] == [SHORTEST_BACKOFF, 2 * SHORTEST_BACKOFF, 4 * SHORTEST_BACKOFF]
    assert lengths[-1] == LONGEST_BACKOFF
    backoff.record("int4", failed=False)
    backoff.record("int4", failed=True)
    assert not backoff.allows("int4")
    assert backoff.allows("int8")


def test_one_flat_context_crowds_nothing() -> None:
    share = ShareLeft(LARGEST_AVERAGE)
    assert not share.record("int4", 0.4)
    assert not any(share.record("int4", 0.001) for _ in range(20))
    assert any(share.record("int4", 2 * LARGEST_AVERAGE) for _ in range(20))


def test_a_crowded_screen_gives_way_to_the_next_finer_one() -> None:
    weight = _weight()
    tiers: dict[str, Tier] = {"int4": quantize(weight, "int4"), "int8": quantize(weight, "int8")}
    shard = Shard(weight, None, None, 1.0, 3000, ladder=Ladder(tiers, ((1, "int4"),)))
    hidden = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    # The 600th best of 3,000 Gaussian logits has many neighbours within int4's bounds.
    needs = [Need("topk", k=600)]
    used = [
        shard.rescore(shard.screen(hidden, RowTable.of(needs))).certificates[0].tier
        for _ in range(12)
    ]
    assert used[0] == "int4"
    assert used[-1] == "int8"
    # What the best 600 crowd is still the best to find one token with.
    one = shard.rescore(shard.screen(hidden, RowTable.of([Need("top1")]))).certificates[0]
    assert one.tier == "int4"


class _Head:
    """Takes as long for a step as ``seconds`` say by screen and kind of need."""

    vocabulary_size = 100

    def __init__(self, clock: ManualClock, seconds: dict[tuple[str, str], float]) -> None:
        self._clock, self._seconds = clock, seconds
        self._screen = ""

    def start_with(self, choices: Choices, for_several: Choices | None = None) -> None:
        self._screen = choices[0][1]

    def screen(self, hidden: npt.NDArray[np.float32], rows: RowTable) -> RowTable:
        return rows

    def rescore(self, rows: RowTable) -> Candidates:
        self._clock.sleep(sum(self._seconds[self._screen, kind] for kind in rows.kinds))
        return SimpleNamespace(offsets=np.array([0, 10 * len(rows)]))  # type: ignore[return-value]


def test_each_kind_of_step_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch, calibration)
    seconds = {
        ("int4", "top1"): 0.001,
        ("int4", "topk"): 0.012,
        ("int8", "top1"): 0.003,
        ("int8", "topk"): 0.003,
    }
    timings = calibrate(_Head(clock, seconds), ["int4", "int8"], np.zeros((4, 8), np.float32), 1)
    assert choose(timings, certified=True) == (((1, "int4"),), ((1, "int8"),))
    assert [(each.kind, each.screen) for each in timings] == [
        ("one", "int4"),
        ("one", "int8"),
        ("several", "int4"),
        ("several", "int8"),
    ]
    assert timings[2].milliseconds == pytest.approx(12.0)
    assert timings[2].rescored_share == pytest.approx(0.1)
