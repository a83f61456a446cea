"""Functions written out give the bits of a row whatever is beside it, and torch's values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from lexshard.actors.body.invariant import functions
from lexshard.actors.body.invariant.functions import finding_callers
from lexshard.actors.body.invariant.modules import make_invariant

NAMES = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2", "silu", "tanh")
Function = Callable[[torch.Tensor], torch.Tensor]


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


PAIRS: list[tuple[Function, Function]] = [
    (functions.sigmoid, torch.sigmoid),
    (functions.silu, functional.silu),
    (functions.gelu, functional.gelu),
    (functions.tanh_gelu, _tanh_gelu),
    (functions.softplus, functional.softplus),
]


def _same_in_every_cut(function: Function) -> bool:
    """The flaw shows in a few elements of a thousand: many cuts of every length below 40."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 4.0
    whole = function(x)
    return all(
        torch.equal(function(x[start : start + length].clone()), whole[start : start + length])
        for length in range(1, 40, 2)
        for start in range(0, 90_000, 397)
    )


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_elements_do_not_depend_on_their_neighbours(ours: Function, theirs: Function) -> None:
    assert _same_in_every_cut(ours)
    x = torch.linspace(-30.0, 30.0, 10_001)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "activation",
    [nn.SiLU(), nn.Sigmoid(), nn.GELU(), nn.GELU("tanh"), *(ACT2FN[name] for name in NAMES)],
)
def test_activations_of_models_are_replaced(activation: nn.Module) -> None:
    model = nn.Sequential(activation)
    x = torch.linspace(-9.0, 9.0, 1001)
    before = model(x)
    make_invariant(model)
    assert _same_in_every_cut(model)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)


class _Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) + functional.softplus(x)


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1, elementwise_affine=False)
        self.gate = _Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x) + self.norm(x)


def test_modules_that_call_such_functions_are_found_and_changed() -> None:
    decoder = _Decoder()
    before = decoder.gate.forward
    x = torch.randn(40, 1)
    with finding_callers(decoder):
        first = decoder(x)
    assert "forward" in vars(decoder.gate)
    assert "forward" not in vars(decoder)
    assert "forward" not in vars(decoder.norm)
    assert torch.equal(decoder(x), first)
    torch.testing.assert_close(decoder.gate(x), before(x))
    assert _same_in_every_cut(decoder.gate)
    assert not decoder.gate._forward_hooks
    assert not decoder.gate._forward_pre_hooks
