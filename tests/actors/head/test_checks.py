"""Settings of the head without any effect are refused before anything is loaded."""

from __future__ import annotations

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.head.sharded.checks import check_shards


def test_spares_of_nothing_are_refused() -> None:
    check_shards(EngineConfiguration("nowhere", shards=2, shard_spares=1))
    with pytest.raises(ValueError, match="add --shards 2"):
        check_shards(EngineConfiguration("nowhere", shard_spares=1))
