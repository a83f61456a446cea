"""Verification with sigmoids: the reference's tokens everywhere, and how wrong these are."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.kernels.sigmoid import cpu, verify_by_sigmoid
from lexshard.kernels.sigmoid.reference import sigmoid_weights
from lexshard.kernels.verify import DenseProposals, DraftedRows, Verdict
from tests.support.decision_cases import FLAVOURS, random_logits
from tests.support.paths import ROOT
from tests.support.verify_cases import (
    Chains,
    assert_same,
    proposals_for,
    random_rows,
    softmax,
)

settings.register_profile("sigmoid", deadline=None)
settings.load_profile("sigmoid")

LIMITS = [(-1.0, 1.0), (-10.0, 10.0), (-1e3, 1e3), (-1e4, 1e4)]
FALSE_ALARM = 1e-4  # of each statistical check; seeds are fixed


BATCHES = {
    "seed": st.integers(0, 2**32),
    "flavour": st.sampled_from(FLAVOURS),
    "kind": st.sampled_from(["dense", "close", "equal"]),
    "limits": st.sampled_from(LIMITS),
}


@settings(max_examples=60)
@given(size=st.sampled_from([1, 7, 64, 65, 300]), **BATCHES)
def test_cpu_gives_the_reference_tokens(
    seed: int, size: int, flavour: str, kind: str, limits: tuple[float, float]
) -> None:
    _check_cpu(seed, size, flavour, kind, limits)


@pytest.mark.slow
@settings(max_examples=300)
@given(size=st.sampled_from([4097, 12_345]), **BATCHES)
def test_cpu_gives_the_reference_tokens_of_long_rows(
    seed: int, size: int, flavour: str, kind: str, limits: tuple[float, float]
) -> None:
    _check_cpu(seed, size, flavour, kind, limits)


def _check_cpu(seed: int, size: int, flavour: str, kind: str, limits: tuple[float, float]) -> None:
    random = np.random.default_rng(seed)
    rows = random_rows(random, 4, 3, size)
    logits = random_logits(random, flavour, int(rows.offsets[-1]), size)
    rows, proposals = proposals_for(random, kind, logits, rows)
    if not isinstance(proposals, DenseProposals):  # no sequence has a draft
        proposals = DenseProposals(np.empty((0, size), np.float32), np.ones(4))
    alpha, beta = limits
    arguments = {"alpha": alpha, "beta": beta}
    expected = verify_by_sigmoid(logits, rows, proposals, **arguments, implementation="reference")
    assert_same(verify_by_sigmoid(logits, rows, proposals, **arguments), expected)


def _law(p: np.ndarray, weights: np.ndarray, q: np.ndarray, proposed: np.ndarray) -> np.ndarray:
    """What is emitted where drafts from ``q`` are tested with the weights of target and drafter."""
    stands = np.minimum(1.0, weights / proposed)
    left = np.maximum(0.0, weights - proposed)
    left = left if left.any() else weights
    return np.asarray(q * stands + (q * (1 - stands)).sum() * left / left.sum())


def _emitted(chains: Chains, limits: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """The law of the first token by the formula, and the target's."""
    target, drafter = chains.target[0], chains.drafter[0]
    weights = [sigmoid_weights(each, 1.0, *limits) for each in (target, drafter)]
    return _law(softmax(target), weights[0], softmax(drafter), weights[1]), softmax(target)


@pytest.mark.parametrize("limits", LIMITS[1:3])
def test_the_kernel_emits_what_the_formula_says(limits: tuple[float, float]) -> None:
    chains = Chains(30, 8, 10_000)
    count = len(chains.keys)
    before = np.zeros(count, np.int64)
    drafts, proposed = chains.draft("dense", before, 1)
    rows = DraftedRows(
        np.arange(count + 1) * 2, drafts, np.ones(count), chains.keys, np.ones(count, np.uint64)
    )
    target = np.repeat(chains.target[before], 2, axis=0)
    proposals = DenseProposals(proposed, np.ones(count))
    found = verify_by_sigmoid(target, rows, proposals, alpha=limits[0], beta=limits[1])
    observed = np.bincount(found.tokens[::2], minlength=chains.size)
    law, _ = _emitted(chains, limits)
    assert stats.chisquare(observed, count * law).pvalue > FALSE_ALARM


def test_its_error_is_what_it_is() -> None:
    """Total variation from the target, of one token, on a pair whose own distance is 0.449.

    The wider the limits, the nearer the output is to the drafter's own: nothing is verified.
    """
    chains = Chains(30, 8, 1)
    own = 0.5 * np.abs(softmax(chains.target[0]) - softmax(chains.drafter[0])).sum()
    errors = []
    for limits in LIMITS:
        law, target = _emitted(chains, limits)
        assert law.sum() == pytest.approx(1)
        errors.append(0.5 * np.abs(law - target).sum())
    assert own == pytest.approx(0.449, abs=5e-4)
    assert errors == pytest.approx([0.410, 0.443, 0.449, 0.449], abs=5e-4)


def test_the_papers_limits_make_all_weights_alike() -> None:
    logits = np.linspace(-40, 40, 100, dtype=np.float32)
    weights = sigmoid_weights(logits, 1.0, -1e4, 1e4)
    assert weights.min() > 0.6219
    assert weights.max() < 0.6230


def check_triton(device: str, cases: tuple[tuple[str, str, int, tuple[float, float]], ...]) -> None:
    for seed, (flavour, kind, size, (alpha, beta)) in enumerate(cases):
        random = np.random.default_rng(seed)
        rows = random_rows(random, 2, 2, size)._replace(inverse_temperature=np.full(2, 0.7))
        logits = random_logits(random, flavour, int(rows.offsets[-1]), size)
        rows, proposals = proposals_for(random, kind, logits, rows)
        assert isinstance(proposals, DenseProposals)
        arguments = {"alpha": alpha, "beta": beta}
        expected = verify_by_sigmoid(
            logits, rows, proposals, **arguments, implementation="reference"
        )
        placed = DenseProposals(
            torch.from_numpy(proposals.logits).to(device), proposals.inverse_temperature
        )
        found = verify_by_sigmoid(
            torch.from_numpy(logits).to(device), rows, placed, **arguments, implementation="triton"
        )
        answer = Verdict(found.accepted.cpu().numpy(), found.tokens.cpu().numpy())
        assert_same(answer, expected)


INTERPRETED = (
    ("plain", "dense", 130, LIMITS[0]),
    ("peaked", "dense", 65, LIMITS[1]),
    ("mostly excluded", "close", 65, LIMITS[3]),
)


@pytest.mark.slow
def test_triton_gives_the_reference_tokens_in_the_interpreter() -> None:
    """With tiles of 64 tokens, so that several programs share a row."""
    pytest.importorskip("triton")
    program = (
        "from lexshard.kernels.sigmoid import triton_kernel\n"
        "triton_kernel.TILE = 64\n"
        "from tests.kernels import test_sigmoid as tests\n"
        "tests.check_triton('cpu', tests.INTERPRETED)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)


COMPILE = """
import numpy as np, torch
from tests.support.compile_only import check, compiling
from lexshard.kernels.sigmoid import verify_by_sigmoid
from lexshard.kernels.verify import DenseProposals, DraftedRows
none = np.zeros(1, np.uint64)
rows = DraftedRows(np.array([0, 2]), np.array([1]), np.ones(1), none, none)
logits = torch.zeros(2, 151_936)
proposals = DenseProposals(logits[:1], np.ones(1))
with compiling() as compiled:
    verify_by_sigmoid(logits, rows, proposals, alpha=-1.0, beta=1.0, implementation="triton")
check(compiled)
assert len(compiled) == 1
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu() -> None:
    """Down to machine code for compute capability 9.0, without a device."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1, 65, 5000, 151_936])
def test_triton_gives_the_reference_tokens_on_the_gpu(size: int) -> None:
    cases = [(each, "dense", size, limits) for each in FLAVOURS for limits in LIMITS]
    check_triton("cuda", tuple(cases))


def test_the_interpreter_lock_is_released() -> None:
    kernels = [each for each in vars(cpu).values() if hasattr(each, "targetoptions")]
    assert all(each.targetoptions.get("nogil") for each in kernels)


def test_what_does_not_fit_is_refused() -> None:
    one = np.ones(1, np.uint64)
    logits = np.zeros((2, 5), np.float32)
    rows = DraftedRows(np.array([0, 2]), np.array([3]), np.ones(1), one, one)
    proposals = DenseProposals(logits[:1], np.ones(1))
    for alpha, beta in ((1.0, 2.0), (-1.0, 0.0), (-np.inf, 1.0)):
        with pytest.raises(ValueError, match="below 0"):
            verify_by_sigmoid(logits, rows, proposals, alpha=alpha, beta=beta)
    with pytest.raises(ValueError, match="dense proposals"):
        verify_by_sigmoid(logits, rows, None, alpha=-1.0, beta=1.0)  # type: ignore[arg-type]
