"""What a head on a GPU prepares before it serves: every graph that a step may ask for.

Nothing is launched here: steps of the device only tell that they were asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.quantize import quantize

SIZE, COLUMNS = 130, 512


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the steps that are launched, in order."""
    pytest.importorskip("triton")
    from lexshard.actors.head.gpu import device_shard, device_step, nucleus_rows

    sizes: list[int] = []

    class Told:
        def read(self) -> None:
            pass

    def launch(step: Any, hidden: torch.Tensor, packed: Any, before: Any) -> Told:
        assert len(hidden) == step.rows
        sizes.append(step.rows)
        return Told()

    def products(shard: Any, hidden: torch.Tensor, ids: Any) -> np.ndarray:
        return np.zeros((len(hidden), SIZE), np.float32)

    def nuclei(own: Any, hidden: torch.Tensor, rows: RowTable) -> Told:
        assert len(hidden) == len(rows)
        return Told()

    monkeypatch.setattr(device_step.DeviceStep, "launch", launch)

    def left(own: Any, step: Any, rows: list[bool], room: int) -> Told:
        assert step.rows == len(rows) == room
        return Told()

    monkeypatch.setattr(nucleus_rows.NucleusRows, "launch", nuclei)
    monkeypatch.setattr(nucleus_rows.NucleusRows, "finish", left)
    monkeypatch.setattr(device_shard.DeviceShard, "_products", products)
    return sizes


ALL = [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(0, [1]), (1, [1]), (3, [1, 2, 4]), (48, ALL), (64, ALL), (200, ALL)],
)
def test_the_bucket_above_the_largest_step_is_warm(
    asked: list[int], largest: int, expected: list[int]
) -> None:
    from lexshard.actors.head.gpu.device_shard import DeviceShard

    weight = torch.randn(SIZE, COLUMNS, generator=torch.Generator().manual_seed(0))
    tier = quantize(weight, "int8")
    DeviceShard(weight, None, None, 1.0, SIZE, tier, device="cpu", capacity=8).warm_up(largest)
    assert asked == expected


def test_a_gpu_screens_with_int8_alone_and_refuses_others() -> None:
    assert EngineConfiguration("m").tiers_of(on_gpu=True) == ("int8",)
    assert EngineConfiguration("m").tiers_of(on_gpu=False) == ("int8", "int4")
    asked = EngineConfiguration("m", tiers=("int8", "int4"))
    assert asked.tiers_of(on_gpu=False) == ("int8", "int4")
    with pytest.raises(ValueError, match="int8 alone screens: leave --tier out"):
        asked.tiers_of(on_gpu=True)
