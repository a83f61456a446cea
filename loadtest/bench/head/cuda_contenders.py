"""The heads that are measured side by side on a CUDA device.

Hidden states start on the device, where the body leaves them; a step ends with tokens on the host.
``python -m loadtest.gpu`` measures the same without the host's share, from CUDA graphs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from lexshard.actors.configuration import DEFAULT_TIERS
from lexshard.actors.head.gpu.device_shard import DeviceShard
from lexshard.actors.head.ladder import Ladder
from lexshard.kernels.draw import draw
from lexshard.loadtest.bench.head.contenders import (
    OURS,
    HeadContender,
    HeadOutput,
    HeadStep,
    build_tiers,
    calibrated,
    choose,
)
from lexshard.loadtest.bench.head.workload import HeadWorkload

DEVICE = torch.device("cuda")
TIERS = ("int8", "int4", "int4-dither")


class DeviceContender:
    """The certified head on the device, and the draw from its candidates on the host."""

    name = OURS

    def __init__(self, shard: DeviceShard) -> None:
        self._shard = shard

    def answer(self, step: HeadStep) -> HeadOutput:
        hidden = torch.from_numpy(step.hidden).to(DEVICE)
        candidates = self._shard.rescore(self._shard.screen(hidden, step.needs))
        tokens = draw(candidates.ids, candidates.logits, candidates.offsets, step.controls)
        read = sum(each.bytes_read for each in candidates.certificates)
        return HeadOutput(tokens, read, candidates.certificates)


class LibraryContender:
    """cuBLAS in bf16 and torch's choice of a token."""

    name = "cuBLAS bf16"

    def __init__(self, workload: HeadWorkload, weight: torch.Tensor) -> None:
        self._weight = weight.bfloat16()
        self._bias = None if workload.bias is None else workload.bias.to(DEVICE)
        self._scale, self._softcap = workload.scale, workload.softcap
        self._generator = torch.Generator(DEVICE).manual_seed(0)

    def answer(self, step: HeadStep) -> HeadOutput:
        with torch.inference_mode():
            hidden = torch.from_numpy(step.hidden).to(DEVICE).bfloat16()
            logits = functional.linear(hidden, self._weight)
            if self._bias is not None:
                logits = logits + self._bias
            if self._scale != 1.0:
                logits = logits * self._scale
            if self._softcap is not None:
                logits = torch.tanh(logits / self._softcap) * self._softcap
            tokens = choose(logits, step.method, self._generator).cpu()
        return HeadOutput(tokens.numpy(), 2 * self._weight.numel())


def cuda_contenders(workload: HeadWorkload, tier: str, largest: int) -> list[HeadContender]:
    """As `contenders.cpu_contenders`. Raises ValueError for "dense", which no device has."""
    if tier == "dense":
        raise ValueError("--tier dense: a device screens with low-precision tiers only")
    names = {"auto": DEFAULT_TIERS, "any": TIERS}.get(tier, (tier,))
    tiers = build_tiers(workload, names)
    shard = DeviceShard(
        workload.weight,
        workload.bias,
        workload.softcap,
        workload.scale,
        len(workload.weight),
        Ladder(tiers, ((1, names[0]),)),
        device=DEVICE,
    )
    shard.warm_up(largest)
    if tier in ("auto", "any"):
        shard.start_with(*calibrated(shard, names, workload, largest))
        shard.warm_up(largest)  # of sizes that were not timed
    return [DeviceContender(shard), LibraryContender(workload, shard.weight)]
