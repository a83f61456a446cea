"""The screen on the tensor cores: estimates of the integers it says, within the bound it says."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from lexshard.kernels.quantize import quantize
from lexshard.kernels.rows import as_array
from lexshard.kernels.rows.reference import canonical_logits
from tests.support.interpreted import interpret
from tests.support.paths import ROOT


def _hidden(seed: int, rows: int, columns: int) -> np.ndarray:
    """Hidden states around a common mean, some channels a hundred times the others."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((rows, columns)) + random.standard_normal(columns)
    hidden[:, random.integers(0, columns, 1 + columns // 100)] *= 100
    return hidden.astype(np.float32)


def _violations(
    estimate: np.ndarray, bound: np.ndarray, hidden: np.ndarray, weight: torch.Tensor
) -> int:
    exact = hidden.astype(np.float64) @ weight.double().numpy().T
    canonical = canonical_logits(hidden, as_array(weight))
    beyond = (np.abs(estimate - canonical) > bound) | (np.abs(estimate - exact) > bound)
    return int(beyond.sum())


def check_bounds(device: str, shapes: tuple[tuple[int, int, int], ...]) -> None:
    from lexshard.kernels.screen.gpu.tensor_cores import place, screen

    for seed, (size, columns, rows) in enumerate(shapes):
        weight = torch.randn(size, columns, generator=torch.Generator().manual_seed(seed))
        hidden = _hidden(seed, rows, columns)
        hidden[1:2] = 0
        for direction in (None, hidden.mean(axis=0)):
            tier = quantize(weight, "int8", direction=direction)
            placed = place(tier, device)
            found = screen(torch.from_numpy(hidden).to(device), placed)
            estimate, row_slack, slack = (part.cpu().numpy() for part in found)
            bound = slack @ row_slack.astype(np.float64)
            assert _violations(estimate, bound, hidden, weight) == 0, columns
            # What is multiplied is what the tier means, to the rounding of the hidden state.
            meaning = tier.dequantise(np.arange(size))
            product = hidden.astype(np.float64) @ meaning.T
            if direction is not None:
                wide = direction.astype(np.float64)
                share = (hidden @ wide / (wide @ wide)).astype(np.float32).astype(np.float64)
                rest = hidden - share[:, None] * wide
                product = rest @ meaning.T + share[:, None] * tier.common.products
            rounding = slack[:, 1:] @ row_slack[1:].astype(np.float64)
            assert np.all(np.abs(estimate - product) <= rounding), columns


def check_aimed_hidden_states_reach_the_bound(device: str) -> None:
    """Along the quantisation errors of rows; with every bound halved the check must fail."""
    from lexshard.kernels.screen.gpu.tensor_cores import place, screen

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(7))
    tier = quantize(weight, "int8")
    error = weight.double().numpy() - tier.dequantise(np.arange(64))
    aimed = 30.0 * error[:8] / np.linalg.norm(error[:8], axis=1, keepdims=True)
    hidden = aimed.astype(np.float32)
    found = screen(torch.from_numpy(hidden).to(device), place(tier, device))
    estimate, row_slack, slack = (part.cpu().numpy() for part in found)
    bound = slack @ row_slack.astype(np.float64)
    assert _violations(estimate, bound, hidden, weight) == 0
    assert _violations(estimate, 0.5 * bound, hidden, weight) >= 8


def check_the_largest_sums_are_right(device: str) -> None:
    """Constant rows have the largest integers, and a parallel hidden state the largest sums."""
    from lexshard.kernels.screen.gpu.tensor_cores import place, screen

    weight = torch.full((3, 1024), 7.0)
    weight[2] *= -1
    hidden = np.full((1, 1024), -5.0, np.float32)
    tier = quantize(weight, "int8")
    found = screen(torch.from_numpy(hidden).to(device), place(tier, device))
    estimate, row_slack, slack = (part.cpu().numpy() for part in found)
    bound = slack @ row_slack.astype(np.float64)
    assert _violations(estimate, bound, hidden, weight) == 0


def check_what_says_nothing_has_no_bound(device: str) -> None:
    """NaN, infinity, and what could overflow: finite estimates, an infinite slack."""
    from lexshard.kernels.screen.gpu.tensor_cores import place, screen

    weight = 1e20 * torch.randn(5, 64, generator=torch.Generator().manual_seed(12))
    hidden = _hidden(12, 4, 64)
    hidden[0] *= 1e20
    hidden[1, 3] = np.nan
    hidden[2, 5] = np.inf
    tier = quantize(weight, "int8")
    found = screen(torch.from_numpy(hidden).to(device), place(tier, device))
    assert torch.isfinite(found.estimate).all()
    assert torch.isinf(found.hidden_slack[:3, 1]).all()
    assert torch.isfinite(found.hidden_slack[3]).all()


SMALL = ((130, 200, 5), (33, 64, 1), (70, 320, 9), (300, 128, 40))


def check_all(device: str) -> None:
    check_bounds(device, SMALL)
    check_aimed_hidden_states_reach_the_bound(device)
    check_the_largest_sums_are_right(device)
    check_what_says_nothing_has_no_bound(device)


def test_the_screen_keeps_its_bounds_in_the_interpreter() -> None:
    program = "from tests.kernels import test_tensor_cores as cases\ncases.check_all('cpu')\n"
    interpret(program)


COMPILE = """
import numpy as np, torch
from tests.support.compile_only import check, compiling
from lexshard.kernels.quantize import quantize
from lexshard.kernels.screen.gpu.tensor_cores import place, screen
weight, direction = torch.randn(300, 256), np.ones(256, np.float32)
with compiling() as compiled:
    placed = place(quantize(weight, "int8", direction=direction), "cpu")
    for rows in (1, 64):
        screen(torch.zeros(rows, 256), placed)
check(compiled)
products = [kernel for kernel in compiled if kernel.name != "hidden_kernel"]
assert all("wgmma" in kernel.asm["ptx"] for kernel in products)
"""


def test_the_screen_compiles_to_integer_products_of_the_tensor_cores() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_screen_keeps_its_bounds_on_the_gpu() -> None:
    check_all("cuda")
    check_bounds("cuda", ((3000, 640, 1), (3000, 640, 8), (1000, 4096, 70)))
