"""Certificates at the size of a real head are never wrong (`test_certificates` says how judged)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.screens import DENSE
from lexshard.actors.head.shard import Shard
from lexshard.kernels.linear import pack
from lexshard.kernels.rows import canonical_logits
from tests.support.certificate_heads import CHOICES, Array, Head, hidden_states, with_tiers
from tests.support.certificate_needs import random_needs
from tests.support.certificate_oracle import Tally, judge

POSITIONS = {"int8": 120, "int4": 50, DENSE: 30}
MORE = 50  # times as many in `make prove`


@pytest.fixture(scope="module")
def full_size() -> Head:
    """V = 131,072, d = 1,024 in bf16: clustered rows whose norms vary, with some copies."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(131_072, 1024, generator=generator)
    weight *= 0.02 * torch.exp(0.3 * torch.randn(131_072, 1, generator=generator))
    weight[1::8] = 0.8 * weight[::8] + 0.2 * weight[1::8]
    weight[2::64] = weight[::64]
    return with_tiers("full size", weight.bfloat16(), kinds=("int8", "int4"), aimed=2048)


def _prove_full_size(head: Head, counts: dict[str, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    _check_canonical(head, hidden_states(random, head, "int8", 8)[0])
    shares = (0.27, 0.27, 0.27, 0.11, 0.02, 0.04, 0.02)
    # As an engine has it: the dense screen is the row kernel.
    shard = Shard(
        head.weight,
        None,
        None,
        1.0,
        len(head.weight),
        linear=pack(head.weight),
        ladder=Ladder(head.tiers, CHOICES["int8"]),
    )
    for screen, wanted in counts.items():
        tally = Tally()
        while tally.certified < wanted:
            # The oracle reads all weights once for so many rows.
            batch = random_needs(random, len(head.weight), 72, shares=shares)
            hidden, kinds = hidden_states(random, head, screen, 72)
            shard.start_with(((1, screen),))
            judge(head, shard, hidden, kinds, batch, tally, screen)
        print(f"{screen}: {tally.report()}")
        assert tally.wrong == []
        assert tally.tiers[screen] > 0.9 * wanted


def _check_canonical(head: Head, hidden: Array) -> None:
    """The oracle's logits are float64 products, rounded to fp32."""
    exact = torch.from_numpy(hidden).double()
    fast = torch.from_numpy(canonical_logits(hidden, head.weight)).double()
    for first in range(0, len(head.weight), 8192):
        rows = head.weight[first : first + 8192].double()
        wide = exact @ rows.T
        sizes = exact.norm(dim=1)[:, None] * rows.norm(dim=1)
        error = (fast[:, first : first + 8192] - wide).abs()
        assert (error <= 2.0**-24 * wide.abs() + 1e-12 * sizes + 1e-45).all()


@pytest.mark.slow
def test_two_hundred_certificates_at_full_size(full_size: Head) -> None:
    """V = 131,072, d = 1,024: 120 positions by int8, 50 by int4, 30 by fp32; 0 violations."""
    _prove_full_size(full_size, POSITIONS, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_certificates_at_full_size(full_size: Head) -> None:
    """6,000 by int8, 2,500 by int4, 1,500 by fp32; 0 violations."""
    _prove_full_size(full_size, {name: MORE * count for name, count in POSITIONS.items()}, seed=4)
