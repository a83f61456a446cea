"""How much of a GPU the KV cache gets, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lexshard.actors.configuration import check_utilization
from lexshard.actors.engine.start.accelerator import describe_device, in_words
from lexshard.actors.engine.start.memory import DeviceMemory, device_kv_bytes

GIB = 1 << 30
BLOCK = 2 << 20  # 16 tokens of an 8B model


def test_the_cache_gets_what_is_left_of_the_share() -> None:
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    assert device_kv_bytes(BLOCK, 8192, 64, memory, 0.9) == 52 * GIB
    assert device_kv_bytes(BLOCK, 8192, 64, memory, 0.5) == 20 * GIB


def test_it_takes_no_more_than_every_sequence_needs() -> None:
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    assert device_kv_bytes(BLOCK, 1024, 4, memory, 0.9) == 4 * 64 * BLOCK


def test_less_than_one_sequence_is_refused_with_what_to_do() -> None:
    memory = DeviceMemory(free=17 * GIB, total=80 * GIB)
    with pytest.raises(ValueError, match="raise --gpu-memory-utilization, lower --max-model-len"):
        device_kv_bytes(BLOCK, 131_072, 64, memory, 0.9)
    full = DeviceMemory(free=0, total=80 * GIB)
    with pytest.raises(ValueError, match="leave 0 MiB"):
        device_kv_bytes(BLOCK, 16, 1, full, 0.9)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="--gpu-memory-utilization"):
        check_utilization(share)


def test_a_cpu_says_nothing_of_a_gpu() -> None:
    assert describe_device(cast(Any, SimpleNamespace(device=torch.device("cpu")))) == ""


def test_the_gpu_is_told_in_words() -> None:
    body = cast(Any, SimpleNamespace())
    told = in_words("NVIDIA H200", DeviceMemory(13 * GIB, 140 * GIB), body)
    assert told == "NVIDIA H200, 140.0 GiB (13.0 left); without CUDA graphs; attention by Triton"
