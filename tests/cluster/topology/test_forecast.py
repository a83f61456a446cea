"""A forecast is its formula: bytes that are read, hops that are waited for, what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lexshard.cluster.topology.forecast import (
    GPUS,
    HOP,
    HOP_OF_A_LEVEL,
    LINK,
    describe,
    forecast,
    forecasts,
)
from lexshard.cluster.topology.sizes import tier_row_bytes
from tests.support.large_sizes import LLAMA

HEAD = 128_256 * 4096
H200 = GPUS["h200"]


def test_one_gpu_reads_the_layers_the_screen_and_what_sequences_have_said() -> None:
    found = forecast(LLAMA, 8, 1, H200, context=2048, most=256)
    assert found is not None
    layers = 2 * (8_030_261_248 - 2 * HEAD)
    screen = 128_256 * tier_row_bytes("int8", 4096)
    a_sequence = 2048 * 2 * 32 * 8 * 128 * 2  # keys and values of 2 bytes
    speed = H200.share * H200.bandwidth
    assert found.one == pytest.approx((layers + screen + a_sequence) / speed)
    assert found.full == pytest.approx((layers + screen + 256 * a_sequence) / speed)
    assert (found.replicas, found.sequences, found.sent) == (8, 256, 0)
    assert found.tokens_per_second == pytest.approx(8 * 256 / found.full)
    assert found.cpus == pytest.approx(56e-6 * found.tokens_per_second)


def test_ranks_read_their_part_and_wait_for_each_other() -> None:
    alone, shared = (forecast(LLAMA, 8, ranks, H200, context=2048, most=1) for ranks in (1, 8))
    assert alone is not None
    assert shared is not None
    exchanges, row = 2 * 32 + 1, 2 * 4096 * 2 * 7 / 8
    hop = HOP + 3 * HOP_OF_A_LEVEL
    waited = exchanges * (hop + row / LINK) + 5 * hop
    assert shared.one == pytest.approx(alone.one / 8 + waited)
    assert shared.sent == pytest.approx(exchanges * row)
    assert shared.gpu_bytes == alone.gpu_bytes / 8
    # Four ranks have each of two key-value heads, and all that it remembers.
    few = replace(LLAMA, kv_heads=2)
    by_two, by_eight = (forecast(few, 8, ranks, H200, context=2048, most=9999) for ranks in (2, 8))
    assert by_two is not None
    assert by_eight is not None
    assert by_two.sequences < by_eight.sequences
    room = (0.9 * 141e9 - by_eight.gpu_bytes) / (2048 * 2 * 32 * 128 * 2)
    assert by_eight.sequences == int(room)


def test_what_does_not_fit_is_left_out_or_refused() -> None:
    assert forecast(LLAMA, 1, 2, H200, context=2048, most=8) is None
    assert forecast(LLAMA, 8, 1, H200, context=2_000_000, most=8) is None
    found = forecasts(LLAMA, [8, 64, 1024], "h100", context=2048, most=256)
    shown = describe(LLAMA, found, "h100", 2048)
    assert shown.startswith("A MODEL, not a measurement")
    assert "1,024 GPUs, nodes of 8: 128" in shown
    assert "a GPU, its rank or its shard 1/1024 to 1/128" in shown
    with pytest.raises(ValueError, match="do not hold large"):
        forecasts(LLAMA, [1], "h100", context=2_000_000, most=1)
