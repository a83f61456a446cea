"""The ways to decide that are measured side by side, all behind the same small interface.

A contender keeps the sampling state of a case's sequences itself and takes every step once, in
order. What is timed is the decision: of ours all of `Sampler.decide`, deltas included, but not the
message it is asked with; of torch the whole tensor program, but not the copy of the logits it
overwrites. The inputs of a run's steps are all made before, and then one step follows the other, as
on a core that a sampler has for itself: code and state are in its caches, logits that others wrote
are not.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.decision.messages import DecisionWork, DenseRows, SamplerSettings
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels.decision import block_maxima
from lexshard.loadtest.bench.sampler.messages import appending, candidate_rows, opening
from lexshard.loadtest.bench.sampler.options import (
    CANDIDATES,
    COLD,
    HOT,
    NAIVE,
    OFFLOADED,
    PARALLEL,
    VLLM,
    WITH_MAXIMA,
)
from lexshard.loadtest.bench.sampler.torch_sampler import TorchSampler
from lexshard.loadtest.bench.sampler.vllm_process import VllmProcess
from lexshard.loadtest.bench.sampler.workload import SamplerWorkload

OURS = (OFFLOADED, WITH_MAXIMA, HOT, CANDIDATES, COLD)

CACHES = 1 << 26  # bytes that push everything else out of the caches

# Of each step its seconds, and its tokens [B] where it draws with our noise.
TimedSteps = list[tuple[float, npt.NDArray[np.int64] | None]]


class SamplerContender(Protocol):
    """One way from logits to tokens."""

    name: str

    def take(self, steps: range) -> TimedSteps:
        """Take the steps of a run, one after the other."""
        ...


class VllmContender:
    """vLLM's own Sampler, in its process."""

    name = VLLM

    def __init__(self, process: VllmProcess, workload: SamplerWorkload) -> None:
        self._process = process
        process.open(workload)

    def take(self, steps: range) -> TimedSteps:
        return [(seconds, None) for seconds in self._process.run(len(steps))]

    def kept(self, step: int) -> npt.NDArray[np.bool_]:
        return self._process.kept()


class TorchContender:
    """The naive port on the whole batch; with ``split`` each row by a sampler of its own, as
    sequence-parallel samplers do, here one after the other."""

    def __init__(self, workload: SamplerWorkload, *, split: bool = False) -> None:
        self.name = PARALLEL if split else NAIVE
        self._workload = workload
        size = 1 if split else workload.batch
        self._parts = [slice(row, row + size) for row in range(0, workload.batch, size)]
        prompts = torch.from_numpy(workload.prompts)
        self._samplers = [
            TorchSampler(workload.setting, prompts[part], seed)
            for seed, part in enumerate(self._parts)
        ]
        self._outputs: list[list[int]] = workload.outputs.tolist()

    def take(self, steps: range) -> TimedSteps:
        made = [torch.from_numpy(self._workload.logits(step)) for step in steps]
        with torch.inference_mode():
            return [
                (self._step(logits, step), None) for step, logits in zip(steps, made, strict=True)
            ]

    def _step(self, logits: torch.Tensor, step: int) -> float:
        started = time.perf_counter()
        for sampler, part in zip(self._samplers, self._parts, strict=True):
            sampler.sample(logits[part], self._outputs[part])
        elapsed = time.perf_counter() - started
        for tokens, token in zip(
            self._outputs, self._workload.appended[step].tolist(), strict=True
        ):
            tokens.append(token)
        return elapsed

    def kept(self, step: int) -> npt.NDArray[np.bool_]:
        """The tokens [B, V] left in ``step``, the next one; of a contender that is not split."""
        logits = torch.from_numpy(self._workload.logits(step))
        with torch.inference_mode():
            return torch.isfinite(self._samplers[0].process(logits, self._outputs)).numpy()


class _OwnContender(ABC):
    """Our sampler with sequences of its own; ``hot`` are the tokens it looks at first, ``cold``
    says that the processor's caches hold nothing of it when a step begins."""

    def __init__(
        self,
        name: str,
        workload: SamplerWorkload,
        *,
        hot: npt.NDArray[np.int32] | None = None,
        cold: bool = False,
    ) -> None:
        self.name = name
        self._workload = workload
        self._rows = range(workload.batch)
        settings = SamplerSettings(workload.vocabulary_size, (), capacity=workload.batch)
        self._sampler = Sampler(settings, hot_ids=hot)
        self._sweep = np.ones(CACHES // 8 if cold else 0, np.int64)

    def take(self, steps: range) -> TimedSteps:
        works = [self._work(step, self._deltas(step)) for step in steps]
        taken: TimedSteps = []
        for work in works:
            self._sweep.sum()
            started = time.perf_counter()
            result = self._sampler.decide(work)
            elapsed = time.perf_counter() - started
            tokens = [-1 if each is None else each.token_id for each in result.decisions]
            taken.append((elapsed, np.array(tokens, np.int64)))
        return taken

    def _deltas(self, step: int) -> Deltas:
        if step == 0:
            return opening(self._workload, self._rows)
        return appending(self._workload, step - 1, self._rows)

    @abstractmethod
    def _work(self, step: int, deltas: Deltas) -> DecisionWork:
        """What the sampler is asked in a step."""


class DenseContender(_OwnContender):
    """All logits, vocabulary-major as their producer writes them, with their block maxima or,
    without ``maxima``, so that the sampler computes them first."""

    def __init__(
        self,
        name: str,
        workload: SamplerWorkload,
        *,
        maxima: bool = True,
        hot: npt.NDArray[np.int32] | None = None,
    ) -> None:
        super().__init__(name, workload, hot=hot)
        self._maxima = maxima

    def _work(self, step: int, deltas: Deltas) -> DecisionWork:
        logits = np.ascontiguousarray(self._workload.logits(step).T)
        maxima = block_maxima(logits) if self._maxima else None
        return DecisionWork(
            step, deltas, dense=DenseRows(RowNames(tuple(self._rows)), logits, maxima)
        )


class CandidateContender(_OwnContender):
    """The tokens that a certificate leaves."""

    def __init__(self, name: str, workload: SamplerWorkload, *, cold: bool = False) -> None:
        super().__init__(name, workload, cold=cold)

    def _work(self, step: int, deltas: Deltas) -> DecisionWork:
        return DecisionWork(
            step, deltas, candidates=candidate_rows(self._workload, step, self._rows)
        )
