"""Logits that are not computed before something reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only

_wanted: ContextVar[bool] = ContextVar("deferred logits are wanted", default=False)


@contextmanager
def deferring() -> Iterator[None]:
    """Inside, logits are for a sampler that can do without; elsewhere (log-probabilities of prompts,
    draft models) they are read in any case."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def is_deferring() -> bool:
    return _wanted.get()


class DeferredLogits(torch.Tensor):
    """Logits [N, V] of ``hidden`` [N, d] that ``compute`` makes when any operation reads them.

    To everything that is not ours this is a tensor of that shape and type. ``decider`` knows the
    head that ``hidden`` belongs to. ``masks`` are the tokens that grammars allow, by row; what must
    be done to the logits for their sake is done once there are any.
    """

    decider: Any
    hidden: torch.Tensor
    masks: dict[int, npt.NDArray[np.uint64]]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        decider: Any,
        hidden: torch.Tensor,
        size: int,
        dtype: torch.dtype,
        compute: Callable[[], torch.Tensor],
    ) -> DeferredLogits:
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (len(hidden), size), dtype=dtype, device=hidden.device
        )
        return made

    def __init__(
        self,
        decider: Any,
        hidden: torch.Tensor,
        size: int,
        dtype: torch.dtype,
        compute: Callable[[], torch.Tensor],
    ) -> None:
        self.decider = decider
        self.hidden = hidden
        self.masks = {}
        self._compute = compute
        self._changes: list[Callable[[torch.Tensor], object]] = []
        self._dense: torch.Tensor | None = None

    def constrain(
        self,
        masks: Mapping[int, npt.NDArray[np.uint64]],
        apply: Callable[[torch.Tensor], object],
    ) -> None:
        """The tokens that may follow in some rows, and what makes the others impossible in place
        in dense logits."""
        self.masks.update(masks)
        if self._dense is None:
            self._changes.append(apply)
        else:
            apply(self._dense)

    def dense(self) -> torch.Tensor:
        """The logits, the same tensor each time."""
        if self._dense is None:
            self._dense = self._compute()
            for change in self._changes:
                change(self._dense)
        return self._dense

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(
            DeferredLogits, DeferredLogits.dense, (args, kwargs or {})
        )
        return func(*args, **kwargs)
