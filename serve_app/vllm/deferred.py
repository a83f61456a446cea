"""Logits that are not computed before something reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only

from lexshard.serve_app.vllm.tally import logger

Words = npt.NDArray[np.uint64]
Compute = Callable[[], torch.Tensor]
Change = Callable[[torch.Tensor], object]
_wanted: ContextVar[bool] = ContextVar("deferred logits are wanted", default=False)
is_deferring = _wanted.get


@contextmanager
def deferring() -> Iterator[None]:
    """Inside, and in what this decorates, logits are for a sampler that can do without; elsewhere
    (of prompts, of draft models) they are read in any case."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


class DeferredLogits(torch.Tensor):
    """Logits [N, V] of ``hidden`` [N, d] that are computed when any operation reads them: to
    everything that is not ours a tensor of that shape and type.

    ``decider`` knows the head that ``hidden`` belongs to. ``masks`` are the tokens that grammars
    allow, by row.
    """

    decider: Any  # lexshard.serve_app.vllm.steps.CertifiedSteps
    hidden: torch.Tensor
    masks: dict[int, Words]
    _compute: Compute
    _changes: list[Change]
    _dense: torch.Tensor | None

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
        made._compute, made._changes, made._dense = compute, [], None
        return made

    def constrain(self, masks: Mapping[int, Words], apply: Change) -> None:
        """The tokens that may follow in some rows, and what makes others impossible in dense
        logits, in place."""
        self.masks.update(masks)
        if self._dense is None:
            self._changes.append(apply)
        else:
            apply(self._dense)

    def is_read(self) -> bool:
        """Whether there are logits already: then a model may have changed some of them in place."""
        return self._dense is not None

    def dense(self) -> torch.Tensor:
        """The logits, the same tensor each time."""
        if self._dense is None:
            self._dense = self._compute()
            for change in self._changes:
                change(self._dense)
        return self._dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = tree_map_only(DeferredLogits, DeferredLogits.dense, (args, kwargs or {}))
        return func(*own[0], **own[1])


def making_ready(load_model: Callable[..., None]) -> Callable[..., None]:
    """``load_model`` of a runner, after which no request waits for the head to be made."""

    @wraps(load_model)
    def load(runner: Any, *args: Any, **kwargs: Any) -> None:
        load_model(runner, *args, **kwargs)
        configuration = runner.model_config
        stages = runner.vllm_config.parallel_config.pipeline_parallel_size > 1
        if stages or runner.lora_config or configuration.runner_type == "pooling":
            return
        shape = 1, configuration.get_hidden_size()
        try:
            with deferring(), torch.inference_mode():
                hidden = torch.zeros(shape, dtype=configuration.dtype, device=runner.device)
                runner.model.compute_logits(hidden)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            logger.warning("lexshard makes its head at the first request: %s", error)

    return load
