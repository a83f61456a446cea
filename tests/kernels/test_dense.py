"""The fused dense draw: the token of the plain computation, up to the rounding of its scores."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from lexshard.kernels.dense import Draws, Implementation, dense_gumbel
from lexshard.kernels.dense.reference import scores
from tests.support.paths import ROOT

# Far above fp32 rounding at these sizes, far below the distance of the two best scores.
TOLERANCE = 1e-4


def _case(
    seed: int, rows: int, size: int, columns: int, dtype: torch.dtype, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor, Draws]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, columns, generator=generator).to(dtype)
    weight = torch.randn(size, columns, generator=generator).to(dtype) / columns**0.5
    random = np.random.default_rng(seed)
    scale = np.where(random.random(rows) < 0.3, 0.0, random.choice([0.5, 1.0, 2.0], rows))
    return (
        hidden,
        weight,
        Draws(
            random.integers(0, 2**64, rows, dtype=np.uint64),
            random.integers(0, 1000, rows).astype(np.uint64),
            np.zeros(rows) if greedy else scale,
        ),
    )


def check(
    device: str,
    implementation: Implementation,
    shapes: tuple[tuple[int, int, int], ...],
    dtype: torch.dtype = torch.float32,
    tolerance: float = TOLERANCE,
) -> None:
    """Every token's exact score is within ``tolerance`` of the best."""
    for seed, shape in enumerate(shapes):
        for greedy in (True, False):
            hidden, weight, draws = _case(seed, *shape, dtype, greedy)
            tokens = dense_gumbel(
                hidden.to(device), weight.to(device), draws, implementation=implementation
            )
            tokens = torch.as_tensor(tokens).cpu().numpy()
            every = scores(hidden, weight, draws)
            own = every[np.arange(len(tokens)), tokens]
            assert np.all(own >= every.max(axis=1) - tolerance), shape


# From 33 hidden rows on, Triton draws their noise in quarters.
SHAPES = ((3, 200, 33), (1, 64, 16), (17, 301, 40), (5, 1, 8), (41, 300, 20))


def test_the_cpu_draws_the_best_token() -> None:
    check("cpu", "cpu", SHAPES)
    check("cpu", "reference", SHAPES, tolerance=0.0)


def test_equal_scores_go_to_the_lower_id() -> None:
    draws = Draws(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1))
    weight = torch.ones(500, 16)
    weight[:7] = 0.5
    assert dense_gumbel(torch.ones(1, 16), weight, draws).tolist() == [7]


def test_shapes_that_do_not_fit_are_refused() -> None:
    draws = Draws(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1))
    with pytest.raises(ValueError, match=r"hidden \[N, d\]"):
        dense_gumbel(torch.ones(1, 15), torch.ones(5, 16), draws)


def check_ties(device: str) -> None:
    draws = Draws(np.zeros(2, np.uint64), np.zeros(2, np.uint64), np.zeros(2))
    weight = torch.ones(500, 16, device=device)
    weight[:7] = 0.5
    hidden = torch.ones(2, 16, device=device)
    assert dense_gumbel(hidden, weight, draws, implementation="triton").tolist() == [7, 7]


def test_triton_draws_the_best_token_in_the_interpreter() -> None:
    """fp32 only: the interpreter's matrix product does not know bf16."""
    pytest.importorskip("triton")
    program = (
        "from tests.kernels import test_dense as cases\n"
        "cases.check('cpu', 'triton', cases.SHAPES); cases.check_ties('cpu')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_draws_the_best_token_on_the_gpu(dtype: torch.dtype) -> None:
    shapes = (*SHAPES, (64, 5000, 512), (70, 1000, 96))
    check("cuda", "triton", shapes, dtype)
    check_ties("cuda")
