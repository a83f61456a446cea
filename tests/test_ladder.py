"""Which screen a step starts with, and when it starts elsewhere."""

from __future__ import annotations

import pytest
import torch

from actors.calibration import Timing, choose
from actors.ladder import CROWDED_SHARE, FIRST_PAUSE, LONGEST_PAUSE, Crowding, Ladder, Pauses
from actors.messages import Need
from actors.screens import DENSE
from actors.shard import Shard
from kernels.quantize import quantize


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


def test_the_fastest_is_chosen_and_dense_only_where_allowed() -> None:
    timings = [
        Timing(1, DENSE, 3.0, 0.0),
        Timing(1, "int4", 1.0, 0.0),
        Timing(1, "int8", 2.0, 0.0),
        Timing(2, DENSE, 3.0, 0.0),
        Timing(2, "int8", 2.0, 0.0),
        Timing(4, DENSE, 3.0, 0.0),
        Timing(4, "int8", 4.0, 0.0),
        Timing(8, DENSE, 3.0, 0.0),
    ]
    assert choose(timings, certified=False) == ((1, "int4"), (2, "int8"), (4, DENSE))
    assert choose(timings, certified=True) == ((1, "int4"), (2, "int8"))


def test_a_barely_faster_screen_changes_nothing() -> None:
    timings = [
        Timing(1, "int8", 1.0, 0.0),
        Timing(1, DENSE, 2.0, 0.0),
        Timing(2, "int8", 2.0, 0.0),
        Timing(2, DENSE, 1.9, 0.0),
    ]
    assert choose(timings, certified=False) == ((1, "int8"),)


def test_pauses_grow_while_failures_follow_each_other() -> None:
    pauses = Pauses()
    lengths = []
    for _ in range(9):
        assert pauses.allows("int4")
        pauses.record("int4", failed=True)
        length = 0
        while not pauses.allows("int4"):
            length += 1
        lengths.append(length)
    assert lengths[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert lengths[-1] == LONGEST_PAUSE
    pauses.record("int4", failed=False)
    pauses.record("int4", failed=True)
    assert not pauses.allows("int4")
    assert pauses.allows("int8")


def test_one_flat_context_crowds_nothing() -> None:
    crowding = Crowding()
    assert not crowding.record("int4", 0.4)
    assert not any(crowding.record("int4", 0.001) for _ in range(20))
    assert any(crowding.record("int4", 2 * CROWDED_SHARE) for _ in range(20))


def test_a_crowded_screen_gives_way_to_the_next_finer_one() -> None:
    weight = _weight()
    tiers = {"int4": quantize(weight, "int4"), "int8": quantize(weight, "int8")}
    shard = Shard(weight, None, None, 1.0, 3000, ladder=Ladder(tiers, ((1, "int4"),)))
    hidden = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    # The 600th best of 3,000 Gaussian logits has many neighbours within int4's bounds.
    needs = [Need("topk", k=600)]
    used = [shard.rescore(shard.screen(hidden, needs)).certificates[0].tier for _ in range(12)]
    assert used[0] == "int4"
    assert used[-1] == "int8"
