"""Ways to verify drafts that are measured side by side on the CPU, from logits to tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.decision import block_maxima, decide_dense
from lexshard.kernels.prefetch import LINE, prefetch
from lexshard.kernels.verify import Verdict, reference, verify
from lexshard.loadtest.bench.synthetic.drafts import VerifyStep
from lexshard.loadtest.bench.synthetic.head_workload import draw_from_all

EXACT, SIGMOID = "exact", "sigmoid"
TRANSFORMERS, TORCH, READ = "transformers", "torch softmax", "read once"


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """How many drafts of each sequence stand [N], and bytes read."""

    accepted: npt.NDArray[np.int64] | None
    bytes_read: float


class VerifyContender(Protocol):
    """One way from the logits of both models to the tokens of a step."""

    def decide(self, number: int) -> Any: ...

    def output(self, answer: Any, step: VerifyStep) -> VerifyOutput:
        """What became of an answer; not measured."""
        ...


class OwnVerify:
    """Ours: `kernels.verify`, exactly or by sigmoids with limits, and a draw from every row behind
    all drafts, as the engine asks for it. Verdicts are of all rows of the target [N (gamma + 1)].
    """

    def __init__(
        self, steps: Sequence[VerifyStep], limits: tuple[float, float] | None = None
    ) -> None:
        self._steps = steps
        self._targets = [step.target for step in steps]
        self._asked = [RowTable.of(step.last_needs) for step in steps]
        self._limits = limits

    def decide(self, number: int) -> Verdict:
        step, asked = self._steps[number], self._asked[number]
        tested, last = self._targets[number]
        verdict = verify(tested, step.rows, proposals=step.proposals, sigmoid=self._limits)
        drawn = decide_dense(last, block_maxima(last), asked.controls, asked.flat).tokens
        return _with_last(verdict, drawn, last.shape[1])

    def by_reference(self, step: VerifyStep) -> Verdict:
        """What the plain reference decides, and draws from all logits."""
        tested, last = step.target
        verdict = reference.verify(tested, step.rows, step.proposals, self._limits)
        return _with_last(verdict, draw_from_all(last, step.last_needs), last.shape[1])

    def output(self, answer: Verdict, step: VerifyStep) -> VerifyOutput:
        tested = answer.tokens.reshape(step.batch, -1)[:, :-1]
        stands = tested == step.rows.drafts.reshape(step.batch, -1)
        accepted = stands.cumprod(axis=1).sum(axis=1)
        return VerifyOutput(accepted, 4.0 * float(answer.logits_read.sum()))


def _with_last(verdict: Verdict, drawn: npt.NDArray[np.int64], size: int) -> Verdict:
    """With the tokens ``drawn`` [N] behind all drafts, of whose rows every logit was read."""
    read = np.full_like(drawn, size)
    parts = ((verdict.tokens, drawn), (verdict.logits_read, read))
    return Verdict(
        *(np.column_stack([each.reshape(len(last), -1), last]).ravel() for each, last in parts)
    )


class TorchVerify:
    """Steps as tensors: logits [N, gamma + 1, V], those of proposals [N, gamma, V], drafts
    [N, gamma]; ``sample`` takes them as they are."""

    def __init__(
        self,
        steps: Sequence[VerifyStep],
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any],
    ) -> None:
        self._sample = sample
        self._steps = []
        for step in steps:
            size = step.logits.shape[1]
            logits, proposed = (torch.from_numpy(each) for each in (step.logits, step.proposed))
            drafts = torch.from_numpy(step.rows.drafts).view(step.batch, -1)
            rows = (logits.view(step.batch, -1, size), proposed.view(step.batch, -1, size))
            self._steps.append((*rows, drafts))

    def decide(self, number: int) -> Any:
        with torch.inference_mode():
            return self._sample(*self._steps[number])

    def output(self, answer: Any, step: VerifyStep) -> VerifyOutput:
        return VerifyOutput(np.array([int(each) for each in answer]), float(step.input_bytes))


def transformers_loop(
    logits: torch.Tensor, proposed: torch.Tensor, drafts: torch.Tensor
) -> list[Any]:
    """`transformers.generation.utils._speculative_sampling`, which takes one sequence: a loop."""
    from transformers.generation.utils import _speculative_sampling

    return [
        _speculative_sampling(
            drafts[one : one + 1],
            proposed[one : one + 1],
            drafts.shape[1],
            logits[one : one + 1],
        )[1]
        for one in range(len(drafts))
    ]


def verify_in_torch(
    logits: torch.Tensor, proposed: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same algorithm for a whole batch: how many drafts [N, gamma] stand [N], and the token
    after them [N]; from logits of the target [N, gamma + 1, V] and the drafter [N, gamma, V]."""
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


class ReadOnce:
    """The floor: a sum of the same memory as integers, eight bytes to an addition, asked for ahead
    of time, which makes it faster than numpy's."""

    def __init__(self, steps: Sequence[VerifyStep], threads: int) -> None:
        self._parts = []
        for step in steps:
            arrays = [_words(each) for each in (step.logits, step.proposed)]
            parts = [part for array in arrays for part in np.array_split(array, threads)]
            self._parts.append([parts[first::threads] for first in range(threads)])

    def decide(self, number: int) -> None:
        own, *rest = self._parts[number]
        others = [threading.Thread(target=_sum_all, args=(parts,)) for parts in rest]
        for other in others:
            other.start()
        _sum_all(own)
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


def sigmoid_name(limits: tuple[float, float]) -> str:
    return f"{SIGMOID} {limits[0]:g}:{limits[1]:g}"


def verify_contenders(
    steps: Sequence[VerifyStep], limits: Sequence[tuple[float, float]], threads: int
) -> dict[str, VerifyContender]:
    """Ours (a sigmoid for each pair of limits), what they are compared with, and the floor."""
    return {
        EXACT: OwnVerify(steps),
        **{sigmoid_name(each): OwnVerify(steps, each) for each in limits},
        TRANSFORMERS: TorchVerify(steps, transformers_loop),
        TORCH: TorchVerify(steps, lambda *step: verify_in_torch(*step)[0]),
        READ: ReadOnce(steps, threads),
    }
