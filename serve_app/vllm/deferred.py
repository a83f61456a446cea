"""What a model runner of vLLM asks of a step: logits that are not computed before something reads
them, and the tokens of requests. Imports nothing that compiles: vLLM looks through all that is
loaded when a worker starts, and fails on objects of the compiler of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only

from lexshard.actors.messages import RowDecision

Answer = tuple[RowDecision, ...]  # a request's tokens of a step
Words = npt.NDArray[np.uint64]
Compute = Callable[[], torch.Tensor]
Change = Callable[[torch.Tensor], object]
_wanted: ContextVar[bool] = ContextVar("deferred logits are wanted", default=False)
is_deferring = _wanted.get


@dataclass(frozen=True, slots=True, eq=False)
class AskedRequest:
    """What one request asks of a step: the token at ``length`` and, behind each of the ``drafts``
    that turns out right, the next one. Its rows of the logits begin at ``first``."""

    request_id: str
    parameters: Any  # vLLM's SamplingParams
    prompt_length: int
    length: int
    first: int
    drafts: tuple[int, ...]
    # Those from one index to another, prompt first; negative where not known yet.
    tokens: Callable[[int, int], Sequence[int]]


@contextmanager
def deferring(wanted: bool = True) -> Iterator[None]:
    """Inside, and in what this decorates, logits are for a sampler that can do without; elsewhere
    (of prompts, of draft models), and where they are not ``wanted``, they are read in any case."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


class DeferredLogits(torch.Tensor):
    """Logits [N, V] of ``hidden`` [N, d] that are computed when any operation reads them: to
    everything that is not ours a tensor of that shape and type.

    ``decider`` knows the head that ``hidden`` belongs to. ``masks`` are the tokens that grammars
    allow, by row. ``read`` are the logits once they are made: a model may change these in place.
    """

    decider: Any  # lexshard.serve_app.vllm.steps.CertifiedSteps
    hidden: torch.Tensor
    masks: dict[int, Words]
    read: torch.Tensor | None
    _compute: Compute
    _changes: list[Change]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, decider: Any, hidden: torch.Tensor, size: int, compute: Compute, dtype: torch.dtype
    ) -> DeferredLogits:
        """Those that ``compute`` makes, ``size`` of each row."""
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            cls, (len(hidden), size), dtype=dtype, device=hidden.device
        )
        made.decider, made.hidden, made.masks = decider, hidden, {}
        made.read, made._compute, made._changes = None, compute, []
        return made

    def constrain(self, masks: Mapping[int, Words], apply: Change) -> None:
        """The tokens that may follow in some rows, and what makes others impossible in dense
        logits, in place."""
        self.masks.update(masks)
        self._changes.append(apply)
        if self.read is not None:
            apply(self.read)

    def dense(self) -> torch.Tensor:
        """The logits, the same tensor each time."""
        if self.read is None:
            self.read = self._compute()
            for change in self._changes:
                change(self.read)
        return self.read

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = tree_map_only(DeferredLogits, DeferredLogits.dense, (args, kwargs or {}))
        return func(*own[0], **own[1])
