"""Mixture-of-experts layers on the CPU, each row independent of the others.

transformers keeps a layer's experts as one stack of matrices and multiplies them with grouped
products whose order of summation depends on how many tokens chose an expert. Here every expert is
packed for the row kernel, and the weighted outputs of a token are added in the order of its own
choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lexshard.kernels.linear import Arithmetic, PackedWeight, linear, pack


def is_experts(module: nn.Module) -> bool:
    """Whether the module is a stack of experts in transformers' common form."""
    known = hasattr(module, "_is_expert_parallel") and hasattr(module, "down_proj")
    return known and not module.has_post_expert_norm


class PackedExperts(nn.Module):
    """Replaces a stack of experts; called with the router's choices like the original.

    The original stays for its activation, without its weights.
    """

    def __init__(self, experts: Any, arithmetic: Arithmetic, compact: bool) -> None:
        super().__init__()
        self.original = experts
        inner = "gate_up_proj" if experts.has_gate else "up_proj"
        self._inner, self._inner_bias = _take_stack(experts, inner, arithmetic, compact)
        self._outer, self._outer_bias = _take_stack(experts, "down_proj", arithmetic, compact)

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        original = self.original
        result: torch.Tensor = (
            original._apply_gate(inner) if original.has_gate else original.act_fn(inner)
        )
        return result

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden [T, d]``, ``chosen [T, k]`` expert ids, ``weights [T, k]`` to ``[T, d]``."""
        tokens, choices = chosen.shape
        outputs = hidden.new_empty(tokens, choices, hidden.shape[-1])
        for expert in torch.unique(chosen).tolist():
            token, choice = torch.where(chosen == expert)
            inner = linear(hidden[token], self._inner[expert])
            if self._inner_bias is not None:
                inner += self._inner_bias[expert]
            outer = linear(self._activate(inner), self._outer[expert])
            if self._outer_bias is not None:
                outer += self._outer_bias[expert]
            outputs[token, choice] = outer
        outputs *= weights[:, :, None]
        result = outputs[:, 0]
        for place in range(1, choices):
            result = result + outputs[:, place]
        return result


def _take_stack(
    experts: Any, name: str, arithmetic: Arithmetic, compact: bool
) -> tuple[list[PackedWeight], torch.Tensor | None]:
    """Packed weights and biases of every expert; the stack itself is given up."""
    stack = getattr(experts, name).detach()
    packed = [
        pack(weight.T if experts.is_transposed else weight, arithmetic=arithmetic, compact=compact)
        for weight in stack
    ]
    setattr(experts, name, None)  # frees it
    bias = getattr(experts, f"{name}_bias").detach().float() if experts.has_bias else None
    return packed, bias
