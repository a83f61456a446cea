"""What rounding to 16 bits does to the plain forward pass itself.

Every layer adds its roundings and passes those before it on, so two correct implementations of a
deep model differ by more than those of a shallow one. How much is known from the plain forward pass
in float32: an implementation is right that is about as near to it as the plain one in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lexshard.actors.body.self_test import Expected, plain_hidden

# The largest of many roundings is seldom twice that of others as good; what a wrong mask or a wrong
# position does is as large as the values are.
AS_NEAR = 2.0
# Steps of other sizes are other orders of additions: some of what rounds, never all. How much is
# assumed: no deep model has been shared among GPUs.
AS_NEAR_AS_SIZES = 4.0
MOST = 0.5  # of the largest value


def precisely(model: Any, expected: Expected, tolerance: float) -> tuple[Expected, float]:
    """What ``model`` computes in float32 in the place of ``expected``, and which difference to that
    is to be expected; both as they came where its code wants 16 bits, or memory is short."""
    try:
        with _in_float32(model):
            hidden = plain_hidden(model, expected.token_ids)
    except (RuntimeError, TypeError, ValueError):
        return expected, tolerance
    own = apart(expected.hidden, hidden)
    if not own <= MOST:  # NaN, too
        return expected, tolerance
    return replace(expected, hidden=hidden), max(tolerance, min(AS_NEAR * own, MOST))


def tolerated(alone: Sequence[Tensor], mixed: Sequence[Tensor], tolerance: float) -> float:
    """Which difference to ``alone`` is to be expected of a body that computes these hidden states
    of sequences by themselves and ``mixed`` in steps of other sizes."""
    return max(tolerance, min(AS_NEAR_AS_SIZES * apart(mixed, alone), MOST))


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference between hidden states, relative to the largest that is expected."""
    values = torch.cat([*expected])
    return float((torch.cat([*found]) - values).abs().max() / values.abs().max())


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Each layer has float32 weights for as long as it computes: never the whole model."""
    hooks: list[RemovableHandle] = []
    kept: dict[int, Tensor] = {}

    def widen(module: torch.nn.Module, *_: Any) -> None:
        for each in (*module.parameters(), *module.buffers()):
            if each.dtype in (torch.bfloat16, torch.float16):
                kept[id(each)] = each.data
                each.data = each.data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for each in (*module.parameters(), *module.buffers()):
            if id(each) in kept:
                each.data = kept.pop(id(each))

    for part in _parts(model.base_model):
        hooks.append(part.register_forward_pre_hook(widen))
        hooks.append(part.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _parts(decoder: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The embedding, each of its layers, the last norm."""
    for child in decoder.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield child
