"""The samplers that are measured side by side.

What is timed is the decision: of ours all of `Sampler.decide`, deltas included, of torch the whole
tensor program without the copy of the logits it overwrites. The inputs of a run's steps are all
made before, and then one step follows the other, as on a core that a sampler has for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.decision.messages import (
    CandidateRows,
    DecisionWork,
    DenseRows,
    SamplerSettings,
)
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.messages import Request
from lexshard.actors.states.deltas import Deltas, OpenSequence
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels.decision import block_maxima
from lexshard.loadtest.bench.frame import timed
from lexshard.loadtest.bench.options.sampler import (
    CANDIDATES,
    COLD,
    NAIVE,
    OFFLOADED,
    VLLM,
    WITH_MAXIMA,
)
from lexshard.loadtest.bench.peers.beside_vllm import VllmSamplers
from lexshard.loadtest.bench.peers.torch_sampler import TorchSampler
from lexshard.loadtest.bench.synthetic.logits import SamplerWorkload

CACHES = 1 << 26  # bytes that push everything else out of the caches

Step = tuple[float, npt.NDArray[np.int64] | None]  # milliseconds, tokens [B] drawn with our noise


class SamplerContender(Protocol):
    """One way from logits to tokens, with sampling state of its own; it takes every step once."""

    def take(self, steps: range) -> list[Step]:
        """The steps of a run, one after the other."""
        ...


class TorchSamplers:
    """The naive port on the whole batch."""

    def __init__(self, workload: SamplerWorkload) -> None:
        self._workload = workload
        self._sampler = TorchSampler(workload.setting, torch.from_numpy(workload.prompts))
        self._outputs: list[list[int]] = workload.outputs.tolist()

    def take(self, steps: range) -> list[Step]:
        made = [torch.from_numpy(self._workload.logits(step)) for step in steps]
        taken: list[Step] = []
        with torch.inference_mode():
            for step, logits in zip(steps, made, strict=True):
                elapsed, _ = timed(partial(self._sampler.sample, logits, self._outputs))
                taken.append((elapsed, None))
                appended = self._workload.appended[step].tolist()
                for tokens, token in zip(self._outputs, appended, strict=True):
                    tokens.append(token)
        return taken

    def kept(self, step: int) -> npt.NDArray[np.bool_]:
        """The tokens [B, V] left in ``step``, the next one."""
        logits = torch.from_numpy(self._workload.logits(step))
        with torch.inference_mode():
            return torch.isfinite(self._sampler.process(logits, self._outputs)).numpy()


class OwnSampler:
    """Our sampler; ``work_of`` makes what it is asked in a step, ``cold`` says that the processor's
    caches hold nothing of it when a step begins."""

    def __init__(
        self,
        workload: SamplerWorkload,
        work_of: Callable[[SamplerWorkload, int, Deltas], DecisionWork],
        *,
        cold: bool = False,
    ) -> None:
        self._workload = workload
        self._work_of = work_of
        settings = SamplerSettings(workload.vocabulary_size, (), capacity=workload.batch)
        self._sampler = Sampler(settings)
        self._sweep = np.ones(CACHES // 8 if cold else 0, np.int64)

    def take(self, steps: range) -> list[Step]:
        works = [
            self._work_of(self._workload, step, deltas_before(self._workload, step))
            for step in steps
        ]
        taken: list[Step] = []
        for work in works:
            self._sweep.sum()
            elapsed, result = timed(partial(self._sampler.decide, work))
            tokens = [-1 if each is None else each.token_id for each in result.decisions]
            taken.append((elapsed, np.array(tokens, np.int64)))
        return taken


def deltas_before(workload: SamplerWorkload, step: int) -> Deltas:
    """What has happened to the sequences since the step before: they were opened, or went on."""
    if step:
        tokens = workload.appended[step - 1].tolist()
        return Deltas(appended=tuple((row, (token,)) for row, token in enumerate(tokens)))
    outputs = workload.outputs.tolist()
    return Deltas(
        opened=tuple(
            OpenSequence(
                row,
                Request(str(row), 0, tuple(prompt), replace(workload.setting, seed=row)),
                tuple(outputs[row]),
            )
            for row, prompt in enumerate(workload.prompts.tolist())
        )
    )


def dense_work(
    workload: SamplerWorkload, step: int, deltas: Deltas, *, maxima: bool = True
) -> DecisionWork:
    """All logits, perhaps with block maxima."""
    logits = workload.logits(step)
    rows = tuple(range(workload.batch))
    dense = DenseRows(RowNames(rows), logits, block_maxima(logits) if maxima else None)
    return DecisionWork(step, deltas, dense=dense)


def candidate_work(workload: SamplerWorkload, step: int, deltas: Deltas) -> DecisionWork:
    """The candidates that a certificate leaves, with their raw logits."""
    ids, raw = workload.candidates(step), workload.logits(step)
    candidates = CandidateRows(
        RowNames(tuple(range(workload.batch))),
        np.concatenate(ids),
        np.concatenate([line[each] for line, each in zip(raw, ids, strict=True)]),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
        np.full(len(ids), workload.setting.asks_for == "nucleus"),
    )
    return DecisionWork(step, deltas, candidates=candidates)


def sampler_contenders(
    workload: SamplerWorkload, variants: Sequence[str], vllm: VllmSamplers | None
) -> dict[str, SamplerContender]:
    """Those of the ``variants`` by name, and vLLM's where there is one."""
    found: dict[str, SamplerContender] = {}
    if vllm is not None:
        vllm.open(workload)
        found[VLLM] = vllm
    makers: dict[str, Callable[[], SamplerContender]] = {
        NAIVE: lambda: TorchSamplers(workload),
        OFFLOADED: lambda: OwnSampler(workload, dense_work),
        WITH_MAXIMA: lambda: OwnSampler(workload, partial(dense_work, maxima=False)),
        CANDIDATES: lambda: OwnSampler(workload, candidate_work),
        COLD: lambda: OwnSampler(workload, candidate_work, cold=True),
    }
    return found | {name: makers[name]() for name in variants}
