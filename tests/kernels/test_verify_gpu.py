"""Verification in Triton: the reference's tokens, in the interpreter and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.decision_cases import FLAVOURS
from tests.support.paths import ROOT
from tests.support.verify_cases import KINDS, check_triton

INTERPRETED = (
    ("plain", "exact", "certain", 200),
    ("plain", "exact", "sparse", 65),
    ("peaked", "exact", "dense", 200),
    ("coarse", "exact", "close", 65),
    ("special", "exact", "dense", 7),
    ("huge", "exact", "equal", 65),
    ("mostly excluded", "coupled", "certain", 150),
    ("equal", "greedy", "certain", 65),
)


@pytest.mark.slow
def test_triton_gives_the_reference_tokens_in_the_interpreter() -> None:
    """With tiles of two blocks, so that several programs share a row."""
    pytest.importorskip("triton")
    program = (
        "from lexshard.kernels.verify import triton_kernel\n"
        "triton_kernel.TILE_BLOCKS = 2\n"
        "from tests.kernels import test_verify_gpu as tests\n"
        "tests.check_triton('cpu', tests.INTERPRETED)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, env=environment, cwd=ROOT
    )


COMPILE = """
import sys
import numpy as np, torch
from tests.support.compile_only import check, compiling
from lexshard.kernels.verify import DenseProposals, DraftedRows, SparseProposals, verify
size = int(sys.argv[1])
none = np.zeros(1, np.uint64)
rows = DraftedRows(np.array([0, 2]), np.array([1]), np.ones(1), none, none)
proposals = {
    "dense": DenseProposals(torch.zeros(1, size), np.ones(1)),
    "sparse": SparseProposals(np.array([1], np.int32), np.ones(1), np.array([0, 1])),
}
with compiling() as compiled:
    for case in sys.argv[2:]:
        mode, _, kind = case.partition("-")
        given = proposals.get(kind)
        verify(torch.zeros(2, size), rows, mode=mode, proposals=given, implementation="triton")
check(compiled)
assert len(compiled) == len(sys.argv) - 2
"""


def _compile(*arguments: str) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, *arguments]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)


@pytest.mark.slow
def test_every_form_of_the_kernel_compiles_for_a_gpu_at_full_size() -> None:
    """Down to machine code for compute capability 9.0, without a device."""
    _compile("151936", "exact-certain", "exact-sparse", "exact-dense", "coupled", "greedy")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 65, 5000, 151_936])
def test_triton_gives_the_reference_tokens_on_the_gpu(size: int) -> None:
    every = [(flavour, "exact", kind, size) for flavour in FLAVOURS for kind in KINDS]
    every += [
        (flavour, mode, "certain", size) for flavour in FLAVOURS for mode in ("coupled", "greedy")
    ]
    check_triton("cuda", tuple(every))
