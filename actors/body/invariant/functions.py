"""Functions of torch whose result for a row depends on the rows beside it, written out.

torch computes SiLU, sigmoid, GELU and softplus by vectors, but the elements left over at the
end of a thread's share by another formula that differs in the last bit; which elements these are
depends on the number of rows. Written out in operations without that flaw they are invariant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))``."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """``x / (1 + exp(-x))``, never in place."""
    return x / torch.exp(-x).add_(1.0)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``."""
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``x / 2 * (1 + erf(x / sqrt(2)))``, or by tanh."""
    if approximate == "tanh":
        return tanh_gelu(x)
    return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """``log(1 + exp(beta x)) / beta``, and ``x`` where ``beta x`` exceeds the threshold."""
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.exp(scaled).log1p_().div_(beta))


_WRITTEN_OUT: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    torch.special.expit: sigmoid,
    functional.silu: silu,
    functional.gelu: gelu,
    functional.softplus: softplus,
}


class InvariantFunctions(TorchFunctionMode):
    """While entered, calls of these functions are the ones above, and ``called`` hears of them.

    Every call of torch costs microseconds more: only the modules that need it should enter it.
    """

    def __init__(self, called: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        written_out = _WRITTEN_OUT.get(func)
        if written_out is not None:
            self._called()
            func = written_out
        return func(*args, **(kwargs or {}))


@contextmanager
def finding_callers(decoder: nn.Module) -> Iterator[None]:
    """Around a step of ``decoder`` that runs every module: modules that call such functions in
    their own code (routers and gates do) call the ones above, in this step and from then on."""
    running: list[nn.Module] = []
    callers: dict[nn.Module, None] = {}
    hooks = [
        hook
        for module in decoder.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _: running.append(module)),
            module.register_forward_hook(lambda *_: _drop_last(running)),
        )
    ]
    try:
        with InvariantFunctions(lambda: callers.setdefault(running[-1])):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    for module in callers:
        module.forward = _with_invariant_functions(module.forward)


def _drop_last(running: list[nn.Module]) -> None:
    running.pop()  # and nothing to return: a hook's result would become the module's


def _with_invariant_functions(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        with InvariantFunctions():
            return forward(*arguments, **named)

    return run
