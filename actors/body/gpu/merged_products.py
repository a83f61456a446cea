"""Products of one input as one: queries, keys and values, and both halves of a gated layer.

A decode step on a GPU takes as long as its weights take to be read, and small matrices leave most
of the device idle: three launches where one reads all their rows. The decoder's code stays as it
is. The first of a group computes the product of all, and the others take their part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

# By name, in the order in which decoders ask for them.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FirstProduct(nn.Module):
    """The product of all ``parts``, of which the first is what was asked for."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        self.weight = _joined([part.weight for part in parts])
        self.bias = None if parts[0].bias is None else _joined([part.bias for part in parts])
        self.rest: list[torch.Tensor | None] = [None] * len(parts[1:])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        first, *rest = nn.functional.linear(values, self.weight, self.bias).split(self.sizes, -1)
        self.rest = list(rest)
        return first


class NextProduct(nn.Module):
    """Part ``place`` of what ``first`` has just computed, which nothing else takes."""

    def __init__(self, first: FirstProduct, place: int) -> None:
        super().__init__()
        self.first = first
        self.place = place

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        part, self.first.rest[self.place] = self.first.rest[self.place], None
        assert part is not None, "the products of a group are asked for in another order"
        return part


def merge_products(decoder: nn.Module) -> None:
    """Every group of ``decoder`` becomes one product. The weights are in memory once."""
    for module, names in list(_groups(decoder)):
        first = FirstProduct([getattr(module, name) for name in names])
        setattr(module, names[0], first)
        for place, name in enumerate(names[1:]):
            setattr(module, name, NextProduct(first, place))


def split_products(decoder: nn.Module) -> None:
    """Undoes `merge_products`."""
    for module in list(decoder.modules()):
        for names in GROUPS:
            first = getattr(module, names[0], None)
            if isinstance(first, FirstProduct):
                weights = first.weight.split(first.sizes)
                biases: Any = [None] * len(names)
                if first.bias is not None:
                    biases = first.bias.split(first.sizes)
                for name, weight, bias in zip(names, weights, biases, strict=True):
                    setattr(module, name, _linear(weight, bias))


def _groups(decoder: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    for module in decoder.modules():
        for names in GROUPS:
            parts = [getattr(module, name, None) for name in names]
            if all(type(part) is nn.Linear for part in parts) and _alike(parts):
                yield module, names


def _alike(parts: Sequence[Any]) -> bool:
    """Whether they multiply the same input, in the same type, all with a bias or none."""
    kinds = {(part.in_features, part.weight.dtype, part.bias is None) for part in parts}
    return len(kinds) == 1


def _joined(parts: Sequence[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), requires_grad=False)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer of these very weights."""
    rows, columns = weight.shape
    made = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made
