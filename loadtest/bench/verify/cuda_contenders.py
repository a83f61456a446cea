"""Ways to verify drafts that are measured side by side on a CUDA device.

Logits start on the device, where the head leaves them, and so do drafts; an answer counts once it
is complete on the device. The host's share (checks, tables, the launch) is in the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lexshard.kernels.sigmoid import verify_by_sigmoid
from lexshard.kernels.verify import DenseProposals, Verdict, verify
from lexshard.loadtest.bench.verify.contenders import (
    COUPLED,
    EXACT,
    READ,
    SIGMOID,
    OwnContender,
    SoftmaxContender,
    TransformersContender,
    VerifyContender,
    VerifyOutput,
)
from lexshard.loadtest.bench.verify.workload import VerifyStep

DEVICE = "cuda"


class DeviceVerifyContender(OwnContender):
    """Ours in Triton."""

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        self._steps = steps
        self._inputs = [
            (
                torch.from_numpy(step.logits).to(DEVICE),
                step.rows._replace(drafts=torch.from_numpy(step.rows.drafts).to(DEVICE)),
                DenseProposals(
                    torch.from_numpy(step.proposed).to(DEVICE), step.proposals.inverse_temperature
                ),
            )
            for step in steps
        ]

    def decide(self, number: int) -> Verdict:
        logits, rows, proposals = self._inputs[number]
        if self._limits is not None:
            alpha, beta = self._limits
            return verify_by_sigmoid(
                logits, rows, proposals, alpha=alpha, beta=beta, implementation="triton"
            )
        return verify(
            logits,
            rows,
            mode=self._mode,  # type: ignore[arg-type]
            proposals=proposals if self._mode == EXACT else None,
            implementation="triton",
        )

    def output(self, answer: Verdict, step: VerifyStep) -> VerifyOutput:
        on_host = Verdict(answer.accepted.cpu().numpy(), answer.tokens.cpu().numpy())
        return VerifyOutput(on_host.accepted, None, on_host)


class DeviceReadContender:
    """The floor: the largest of the same memory."""

    name = READ

    def prepare(self, steps: Sequence[VerifyStep]) -> None:
        self._arrays = [
            [torch.from_numpy(each).to(DEVICE) for each in (step.logits, step.proposed)]
            for step in steps
        ]

    def decide(self, number: int) -> Any:
        return [array.amax() for array in self._arrays[number]]

    def output(self, answer: Any, step: VerifyStep) -> VerifyOutput:
        return VerifyOutput(None, float(step.input_bytes))


def cuda_contenders(limits: Sequence[tuple[float, float]]) -> list[VerifyContender]:
    """As `contenders.cpu_contenders`."""
    return [
        DeviceVerifyContender(EXACT),
        DeviceVerifyContender(COUPLED),
        *(DeviceVerifyContender(SIGMOID, each) for each in limits),
        TransformersContender(DEVICE),
        SoftmaxContender(DEVICE),
        DeviceReadContender(),
    ]


def peak_device_memory(call: Any) -> float:
    """Bytes of the device's memory at their highest during ``call``, less those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)
