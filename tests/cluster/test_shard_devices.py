"""Which GPU a shard computes on."""

from __future__ import annotations

import torch

from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.part import ShardPart
from lexshard.cluster.shards.gang import on_devices_apart


def test_shards_that_reserve_nothing_share_out_the_gpus_of_the_machine() -> None:
    """The root has the first; Ray shows all of them to each."""

    def devices(device: str, count: int) -> list[str]:
        owned = OwnedRows.every(64)
        part = ShardPart(torch.zeros(64, 8), None, None, 1.0, owned, (), 1, device=device)
        return [each.device for each in on_devices_apart([part] * 3, count)]

    assert devices("cuda", 4) == ["cuda:1", "cuda:2", "cuda:3"]
    assert devices("cuda:0", 2) == ["cuda:1", "cuda:0", "cuda:1"]
    assert devices("cpu", 0) == ["cpu"] * 3
