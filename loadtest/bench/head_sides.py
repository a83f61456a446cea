"""The heads that are measured side by side on the CPU, all behind the same small interface.

Ours choose tokens with the served noise; torch's draw with its own generator, by the exponential
race ``argmax(p / q)`` that vLLM and gpt-fast use (`torch.multinomial` is slower at these sizes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from actors.ladder import Choices, Ladder
from actors.messages import Certificate, Need
from actors.screens import DENSE, Linear
from actors.shard import Shard
from kernels.draw import Controls, draw
from kernels.linear import linear, pack
from kernels.quantize import Tier, quantize
from loadtest.bench.head_workload import Kind, Workload

_BUILDERS: dict[str, Callable[..., Tier]] = {
    "int8": partial(quantize, kind="int8"),
    "int4": partial(quantize, kind="int4"),
    "int4-dither": partial(quantize, kind="int4-dither"),
    "1-bit": partial(quantize, kind="1-bit"),
}
TIERS = tuple(_BUILDERS)


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a step [B], the bytes it read, and certificates where there are any."""

    tokens: npt.NDArray[np.int64]
    bytes_read: int
    certificates: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a side is asked: hidden states [B, d], and the same wish in two forms."""

    hidden: npt.NDArray[np.float32]
    kind: Kind
    needs: list[Need]
    controls: Controls


class Side(Protocol):
    """One way to get from hidden states to tokens."""

    name: str

    def answer(self, step: Step) -> Answer: ...


class ShardSide:
    """The whole of ours: screen, rescoring, draw."""

    def __init__(self, name: str, shard: Shard) -> None:
        self.name = name
        self._shard = shard

    def answer(self, step: Step) -> Answer:
        candidates = self._shard.rescore(self._shard.screen(step.hidden, step.needs))
        tokens = draw(candidates.ids, candidates.logits, candidates.offsets, step.controls)
        read = sum(each.bytes_read for each in candidates.certificates)
        return Answer(tokens, read, candidates.certificates)


class LogitsSide:
    """Approximate logits of every row by one product, and a draw from them: what others do."""

    def __init__(self, name: str, product: Linear, workload: Workload, bytes_read: int) -> None:
        self.name = name
        self._product = product
        self._bias = workload.bias
        self._scale = workload.scale
        self._softcap = workload.softcap
        self._bytes = bytes_read
        self._generator = torch.Generator().manual_seed(0)

    def answer(self, step: Step) -> Answer:
        with torch.inference_mode():
            logits = self._product(torch.from_numpy(step.hidden))
            if self._bias is not None:
                logits = logits + self._bias
            if self._scale != 1.0:
                logits = logits * self._scale
            if self._softcap is not None:
                logits = torch.tanh(logits / self._softcap) * self._softcap
            tokens = choose(logits, step.kind, self._generator)
        return Answer(tokens.numpy(), self._bytes)


def choose(logits: torch.Tensor, kind: Kind, generator: torch.Generator) -> torch.Tensor:
    """Tokens [B] of ``logits`` [B, V] at temperature 1, the usual way in torch."""
    if kind.greedy:
        return logits.argmax(dim=1)
    if kind.top_k:
        values, ids = logits.topk(kind.top_k, dim=1)
        return ids.gather(1, _race(values.float(), generator)[:, None])[:, 0]
    if kind.min_p:
        floor = logits.amax(dim=1, keepdim=True).float() + float(np.log(kind.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return _race(logits.float(), generator)


def _race(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shares = logits.softmax(dim=1)
    clocks = torch.empty_like(shares).exponential_(generator=generator)
    return shares.div_(clocks).argmax(dim=1)


def build_tiers(workload: Workload, wanted: str) -> dict[str, Tier]:
    """The tier ``wanted``, or all of them for "auto"; none for "dense".

    They keep the mean of the calibration states apart as a common direction.
    """
    if wanted == "dense":
        return {}
    direction = workload.calibration.mean(axis=0)
    names = [name for name in TIERS if wanted in (name, "auto")]
    return {name: _BUILDERS[name](workload.weight, direction=direction) for name in names}


class Sides:
    """Everything that is built once per head: weights in every form, tiers, shards."""

    def __init__(self, workload: Workload, tiers: dict[str, Tier]) -> None:
        weight = workload.weight
        size, columns = weight.shape
        self._workload = workload
        self._packed = partial(linear, weight=pack(weight))
        self._wide = weight.float()
        self._half = weight.bfloat16()
        self._products = size * columns
        self._tiers = tiers

    def shard(self, ladder: Ladder | None) -> Shard:
        workload = self._workload
        return Shard(
            workload.weight,
            workload.bias,
            softcap=workload.softcap,
            scale=workload.scale,
            vocabulary_size=workload.weight.shape[0],
            linear=self._packed,
            ladder=ladder,
        )

    def certified(self, choices: Choices) -> Shard:
        """A shard whose ladder starts with ``choices``."""
        return self.shard(Ladder(self._tiers, choices))

    def others(self) -> list[Side]:
        """What a certified head is compared with."""
        weight, stored = self._workload.weight, self._workload.weight.element_size()
        wide = partial(torch.nn.functional.linear, weight=self._wide)
        half = self._half
        sides: list[Side] = [ShardSide("own dense", self.shard(None))]
        for name, product, size in (
            ("row kernel", self._packed, stored),
            ("torch fp32", wide, 4),
            ("torch bf16", lambda x: torch.nn.functional.linear(x.bfloat16(), half), 2),
        ):
            sides.append(LogitsSide(name, product, self._workload, weight.numel() * size))
        return sides


def single(tier: str) -> Choices:
    """Choices that always start with one tier."""
    return ((1, DENSE if tier == "dense" else tier),)
