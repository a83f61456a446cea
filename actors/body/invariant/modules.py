"""Replacements for torch modules whose result for a row depends on the rows beside it, or that
are slow for a few rows.

- ``nn.Linear`` sums in another order for one row than for sixteen: the packed row kernel does
  not, and reads bfloat16 weights at half the bytes.
- Activations are written out (`actors.body.invariant.functions`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lexshard.actors.body.experts import PackedExperts, is_experts
from lexshard.actors.body.invariant.functions import gelu, sigmoid, silu, tanh_gelu
from lexshard.kernels.linear import Arithmetic, linear, pack
from lexshard.kernels.linear.compact import should_be_compact


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` by the row kernel, summed in float32.

    Models look at their layers' weights, mostly for the type to compute in. ``weight`` here has the
    type, shape and device, takes no memory and is nothing to compute with: it is NaN, which the
    self-test at load notices.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, arithmetic: Arithmetic, compact: bool
    ) -> None:
        super().__init__()
        self._packed = pack(weight, arithmetic=arithmetic, compact=compact)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.weight = torch.full((), torch.nan).expand(weight.shape)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = linear(x.reshape(-1, self.in_features), self._packed)
        if self.bias is not None:
            result += self.bias
        return result.view(*x.shape[:-1], self.out_features)


class FusedRMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` in one pass: torch takes six, which cost a
    small model an eighth of its decode step."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self._weight = weight.detach().float().contiguous().numpy()
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from lexshard.kernels.llama.parts import normalize  # numba compiles on first use

        rows = x.reshape(-1, self._weight.shape[0]).numpy()
        out = np.empty_like(rows)
        normalize(rows, self._weight, self._epsilon, out)
        return torch.from_numpy(out).view(x.shape)


def _fused_rms_norm(module: Any) -> FusedRMSNorm | None:
    """The replacement of a family's own RMSNorm class, where it computes just that.

    Families differ in whether the weight is stored minus one; both are tried on random rows.
    """
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or weight is None or weight.ndim != 1:
        return None
    rows = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
    expected = module(rows)
    for offset in (0.0, 1.0):
        candidate = FusedRMSNorm(weight + offset, epsilon)
        if torch.allclose(candidate(rows), expected, rtol=1e-5, atol=1e-6):
            return candidate
    return None


class WrittenOut(nn.Module):
    """An activation by a function of `actors.body.invariant.functions`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def _replacement(module: Any, arithmetic: Arithmetic, compact: bool) -> nn.Module | None:
    from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
    from transformers.pytorch_utils import Conv1D

    if is_experts(module):
        return PackedExperts(module, arithmetic, compact)
    if type(module) is nn.Linear:
        return PackedLinear(module.weight, module.bias, arithmetic, compact)
    if type(module) is Conv1D:
        return PackedLinear(module.weight.T, module.bias, arithmetic, compact)
    if type(module).__name__.endswith("RMSNorm"):
        return _fused_rms_norm(module)
    if isinstance(module, (nn.SiLU, SiLUActivation)):
        return WrittenOut(silu)
    if isinstance(module, nn.Sigmoid):
        return WrittenOut(sigmoid)
    if isinstance(module, (GELUTanh, GELUActivation, nn.GELU)):
        by_tanh = isinstance(module, GELUTanh) or getattr(module, "approximate", "none") == "tanh"
        return WrittenOut(tanh_gelu if by_tanh else gelu)
    return None


def make_invariant(
    decoder: nn.Module, *, arithmetic: Arithmetic = "float32", pack_linears: bool = True
) -> None:
    """Replace what ``decoder`` is built of, in place, module by module (so memory stays level).

    With ``pack_linears`` off, linears and experts stay torch's, which are invariant from 4 rows
    on.
    """
    stored = sum(2 * each.numel() for each in decoder.parameters())
    compact = arithmetic == "bfloat16" and should_be_compact(stored)
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if not pack_linears and next(child.parameters(), None) is not None:
                continue
            replacement = _replacement(child, arithmetic, compact)
            if replacement is not None:
                setattr(parent, name, replacement)


def has_bare_matrices(decoder: nn.Module) -> bool:
    """Whether a product is left to torch: a matrix outside of embeddings and packed linears.

    Routers of expert models are such; torch needs at least 4 rows to be invariant.
    """
    return any(
        parameter.ndim > 1
        for module in decoder.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )
