"""Which type weights have where, and which way they go there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lexshard.actors.body import loading
from lexshard.actors.body.loading import load
from tests.support.tiny_models import save_tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "stored", "place", "expected"),
    [
        ("auto", {"F16"}, CUDA, torch.float16),
        ("auto", {"F16"}, CPU, torch.float32),
        ("auto", {"F16", "F32"}, CUDA, torch.float16),
        ("auto", {"BF16"}, CUDA, torch.bfloat16),
        ("auto", {"BF16", "F32"}, CUDA, torch.bfloat16),
        ("auto", {"BF16", "F32"}, CPU, torch.float32),
        ("auto", {"BF16"}, CPU, torch.bfloat16),
        ("auto", {"F32"}, CUDA, torch.float32),
        ("bfloat16", {"F16"}, CUDA, torch.bfloat16),
        ("float32", {"F16"}, CUDA, torch.float32),
    ],
)
def test_sixteen_bits_stay_sixteen_bits_on_a_gpu(
    wanted: str, stored: set[str], place: torch.device, expected: torch.dtype
) -> None:
    assert loading.dtype_of_weights(wanted, frozenset(stored), place) is expected


def test_weights_go_straight_to_a_gpu_where_accelerate_places_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: object())
    assert loading._placement(CUDA) == {"device_map": {"": CUDA}}
    assert loading._placement(CPU) == {}
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert loading._placement(CUDA) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_float16_checkpoint_is_served_as_it_is_stored(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, dtype=torch.float16)
    model = load(tmp_path, device="cuda")
    assert model.dtype == "float16"
    assert model.body.kv_bytes_per_block() == 2 * 2 * 16 * 2 * 8 * 2
    assert model.head.weight.is_cuda
