"""Ways to verify drafts that are measured side by side on the CPU, from logits to tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.prefetch import LINE, prefetch
from lexshard.kernels.verify import Verdict, verify
from lexshard.loadtest.bench.verify.workload import VerifyStep

EXACT, SIGMOID = "exact", "sigmoid"
TRANSFORMERS, TORCH, READ = "transformers", "torch softmax", "read once"


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """How many drafts of each sequence stand [N], and bytes read."""

    accepted: npt.NDArray[np.int64] | None
    bytes_read: float | None


class VerifyContender(Protocol):
    """One way from the logits of both models to the tokens of a step."""

    name: str

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        """Bring the steps into the form that the contender takes; not measured."""
        ...

    def decide(self, number: int) -> Any: ...

    def output(self, answer: Any, step: VerifyStep) -> VerifyOutput:
        """What became of an answer; not measured."""
        ...


class OwnContender:
    """Ours: `kernels.verify`, exactly or by sigmoids with limits."""

    def __init__(self, name: str, limits: tuple[float, float] | None = None) -> None:
        self.name = name if limits is None else f"{name} {limits[0]:g}:{limits[1]:g}"
        self._limits = limits
        self._steps: Sequence[VerifyStep] = ()

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        self._steps = steps
        self._targets = [step.tested_logits for step in steps]

    def decide(self, number: int) -> Verdict:
        step = self._steps[number]
        return verify(
            self._targets[number], step.rows, proposals=step.proposals, sigmoid=self._limits
        )

    def verify(self, step: VerifyStep, implementation: Any) -> Verdict:
        return verify(
            step.tested_logits,
            step.rows,
            proposals=step.proposals,
            sigmoid=self._limits,
            implementation=implementation,
        )

    def output(self, answer: Verdict, step: VerifyStep) -> VerifyOutput:
        stands = (answer.tokens == step.rows.drafts).reshape(step.batch, -1)
        accepted = stands.cumprod(axis=1).sum(axis=1)
        return VerifyOutput(accepted, 4.0 * float(answer.logits_read.sum()))


class TorchSteps:
    """Steps as tensors [N, gamma + 1, V], [N, gamma, V] and drafts [N, gamma] of one device."""

    def __init__(self, steps: Sequence[VerifyStep], device: str) -> None:
        self.logits, self.proposed, self.drafts = [], [], []
        for step in steps:
            size = step.logits.shape[1]
            logits, proposed = (torch.from_numpy(each) for each in (step.logits, step.proposed))
            self.logits.append(logits.view(step.batch, -1, size).to(device))
            self.proposed.append(proposed.view(step.batch, -1, size).to(device))
            self.drafts.append(torch.from_numpy(step.rows.drafts).view(step.batch, -1).to(device))


class TransformersContender:
    """`transformers.generation.utils._speculative_sampling`, which takes one sequence: a loop."""

    name = TRANSFORMERS

    def __init__(self, device: str = "cpu") -> None:
        from transformers.generation.utils import _speculative_sampling  # takes seconds

        self._sample = _speculative_sampling
        self._device = device

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        self._steps = TorchSteps(steps, self._device)

    def decide(self, number: int) -> list[Any]:
        steps = self._steps
        drafts, proposed, logits = (
            each[number] for each in (steps.drafts, steps.proposed, steps.logits)
        )
        with torch.inference_mode():
            return [
                self._sample(
                    drafts[one : one + 1],
                    proposed[one : one + 1],
                    drafts.shape[1],
                    logits[one : one + 1],
                )[1]
                for one in range(len(drafts))
            ]

    def output(self, answer: list[Any], step: VerifyStep) -> VerifyOutput:
        accepted = np.array([int(each) for each in answer])
        return VerifyOutput(accepted, float(step.input_bytes))


class SoftmaxContender:
    """The same algorithm in torch for a whole batch: two softmaxes, a residual, `multinomial`."""

    name = TORCH

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        self._steps = TorchSteps(steps, self._device)

    def decide(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps = self._steps
        with torch.inference_mode():
            return verify_in_torch(
                steps.logits[number], steps.proposed[number], steps.drafts[number]
            )

    def output(self, answer: tuple[torch.Tensor, torch.Tensor], step: VerifyStep) -> VerifyOutput:
        return VerifyOutput(answer[0].cpu().numpy(), float(step.input_bytes))


def verify_in_torch(
    logits: torch.Tensor, proposed: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafts [N, gamma] stand [N], and the token after them [N]; from the logits of
    the target [N, gamma + 1, V] and of the drafter [N, gamma, V]."""
    count, gamma = drafts.shape
    p, q = logits.softmax(-1), proposed.softmax(-1)
    of_draft = drafts[:, :, None]
    ratios = p[:, :gamma].gather(2, of_draft) / q.gather(2, of_draft)
    stands = torch.rand_like(ratios) <= ratios
    accepted = stands[:, :, 0].long().cumprod(1).sum(1)
    every = torch.arange(count, device=drafts.device)
    left = p[every, accepted]
    rejected = (accepted < gamma)[:, None]
    taken = q[every, accepted.clamp(max=gamma - 1)]
    left = torch.where(rejected, (left - taken).clamp_(min=0), left)
    return accepted, torch.multinomial(left, 1)[:, 0]


class ReadContender:
    """The floor: a sum of the same memory as integers, eight bytes to an addition, asked for ahead
    of time, which makes it faster than numpy's."""

    name = READ

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._arrays: list[list[npt.NDArray[np.int64]]] = []

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        self._arrays = [[_words(each) for each in (step.logits, step.proposed)] for step in steps]

    def decide(self, number: int) -> None:
        parts = [
            part for array in self._arrays[number] for part in np.array_split(array, self._threads)
        ]
        others = [
            threading.Thread(target=_sum_all, args=(parts[first :: self._threads],))
            for first in range(1, self._threads)
        ]
        for other in others:
            other.start()
        _sum_all(parts[:: self._threads])
        for other in others:
            other.join()

    def output(self, answer: None, step: VerifyStep) -> VerifyOutput:
        return VerifyOutput(None, float(step.input_bytes))


def _words(array: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    flat = array.reshape(-1)
    return flat[: flat.size // 2 * 2].view(np.int64)


def _sum_all(parts: Sequence[npt.NDArray[np.int64]]) -> None:
    for part in parts:
        sum_words(part)


@njit(nogil=True, cache=True)
def sum_words(words):  # type: ignore[no-untyped-def]
    total, whole = 0, words.size // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        for line in range(0, BLOCK, LINE // 8):
            prefetch(words, first + line)
        for offset in range(BLOCK):
            total += words[first + offset]
    for index in range(whole, words.size):
        total += words[index]
    return total


def cpu_contenders(limits: Sequence[tuple[float, float]], threads: int) -> list[VerifyContender]:
    """Ours (a sigmoid for each pair of limits), what they are compared with, and the floor."""
    return [
        OwnContender(EXACT),
        *(OwnContender(SIGMOID, each) for each in limits),
        TransformersContender(),
        SoftmaxContender(),
        ReadContender(threads),
    ]
