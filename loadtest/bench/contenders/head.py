"""The heads that are measured side by side, all behind the same small interface.

Ours choose tokens with the served noise; torch's draw with its own generator, by the exponential
race ``argmax(p / q)`` of vLLM, gpt-fast and `torch.multinomial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lexshard.actors.configuration import DEFAULT_TIERS
from lexshard.actors.head.calibration import LadderHead, calibrate
from lexshard.actors.head.calibration import choose as choose_screens
from lexshard.actors.head.ladder import Choices, Ladder
from lexshard.actors.head.screens import DENSE, Linear
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Certificate
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.draw import draw
from lexshard.kernels.linear import linear, pack
from lexshard.kernels.quantize import Tier, quantize
from lexshard.loadtest.bench.options.head import TIERS
from lexshard.loadtest.bench.synthetic.head_workload import HeadWorkload

CALIBRATED = {"auto": DEFAULT_TIERS, "any": TIERS}
OURS, DENSE_HEAD = "certified", "own dense"


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """The tokens of a step [B], the bytes it read, and certificates where there are any."""

    tokens: npt.NDArray[np.int64]
    bytes_read: int
    certificates: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HeadStep:
    """What a contender is asked: hidden states [B, d], and how to choose each row's token."""

    hidden: npt.NDArray[np.float32]
    method: Need
    needs: Sequence[Need]


class HeadContender(Protocol):
    """One way to get from hidden states to tokens."""

    def answer(self, step: HeadStep) -> HeadOutput: ...


class CertifiedContender:
    """The whole of ours: screen, rescoring, draw."""

    def __init__(self, head: Shard) -> None:
        self._head = head

    def answer(self, step: HeadStep) -> HeadOutput:
        rows = RowTable.of(step.needs)
        candidates = self._head.rescore(self._head.screen(step.hidden, rows))
        tokens = draw(candidates.ids, candidates.logits, candidates.offsets, rows.controls)
        read = sum(each.bytes_read for each in candidates.certificates)
        return HeadOutput(tokens, read, candidates.certificates)


class LogitsContender:
    """Approximate logits of every row by one product, and a draw from them: what others do."""

    def __init__(self, product: Linear, bytes_read: int) -> None:
        self._product = product
        self._bytes = bytes_read
        self._generator = torch.Generator().manual_seed(0)

    def answer(self, step: HeadStep) -> HeadOutput:
        with torch.inference_mode():
            logits = self._product(torch.from_numpy(step.hidden))
            tokens = choose(logits, step.method, self._generator)
        return HeadOutput(tokens.numpy(), self._bytes)


def choose(logits: torch.Tensor, method: Need, generator: torch.Generator | None) -> torch.Tensor:
    """Tokens [B] of ``logits`` [B, V] at temperature 1, the usual way in torch."""
    if not method.inverse_temperature:
        return logits.argmax(dim=1)
    if method.k:
        values, ids = logits.topk(method.k, dim=1)
        return ids.gather(1, _race(values.float(), generator)[:, None])[:, 0]
    if method.min_p:
        floor = logits.amax(dim=1, keepdim=True).float() + float(np.log(method.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if method.top_p < 1:
        values, ids = logits.float().sort(dim=1, descending=True)
        shares = values.softmax(dim=1)
        values = values.masked_fill(shares.cumsum(dim=1) - shares >= method.top_p, -torch.inf)
        return ids.gather(1, _race(values, generator)[:, None])[:, 0]
    return _race(logits.float(), generator)


def _race(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    shares = logits.softmax(dim=1)
    clocks = torch.empty_like(shares).exponential_(generator=generator)
    return shares.div_(clocks).argmax(dim=1)


def build_tiers(workload: HeadWorkload, names: Sequence[str]) -> dict[str, Tier]:
    """Low-precision copies of the weights, with the mean of the calibration states kept apart as
    a common direction."""
    direction = workload.calibration.mean(axis=0)
    return {name: quantize(workload.weight, name, direction=direction) for name in names}  # type: ignore[call-overload]


def head_contenders(workload: HeadWorkload, tier: str, largest: int) -> dict[str, HeadContender]:
    """Ours with ``tier``, and everything it is compared with.

    "auto" chooses among an engine's own tiers, "any" among all, by calibration for batches of up
    to ``largest``; "dense" screens with the weights.
    """
    weight = workload.weight
    row_kernel = partial(linear, weight=pack(weight))
    names = CALIBRATED.get(tier, (tier,) if tier in TIERS else ())
    ladder = Ladder(build_tiers(workload, names), ((1, DENSE if tier == "dense" else names[0]),))
    shard = _shard(workload, row_kernel, ladder)
    if tier in CALIBRATED:
        shard.start_with(*calibrated(shard, [*names, DENSE], workload, largest))
    dense = _shard(workload, row_kernel, None)
    wide, half, count = weight.float(), weight.bfloat16(), weight.numel()
    return {
        OURS: CertifiedContender(shard),
        DENSE_HEAD: CertifiedContender(dense),
        "torch fp32": LogitsContender(partial(functional.linear, weight=wide), 4 * count),
        "torch bf16": LogitsContender(
            lambda hidden: functional.linear(hidden.bfloat16(), half), 2 * count
        ),
    }


def calibrated(
    shard: LadderHead, names: Sequence[str], workload: HeadWorkload, largest: int
) -> tuple[Choices, Choices]:
    """The screens that were fastest at each batch size, on hidden states that are not measured:
    of steps without and with top-k rows."""
    timings = calibrate(shard, names, workload.calibration, largest)
    for each in timings:
        print(
            f"  {each.kind}, {each.rows:>2} rows, {each.screen}: {each.milliseconds:.2f} ms, "
            f"rescored {100 * each.rescored_share:.3f}%"
        )
    one, several = choose_screens(timings, certified=False)
    for words, choices in (("one token per row", one), ("top-k", several)):
        found = ", ".join(f"{name} from {rows}" for rows, name in choices)
        print(f"chosen by calibration for {words}, by rows in a step: {found}")
    return one, several


def _shard(workload: HeadWorkload, linear_: Linear, ladder: Ladder | None) -> Shard:
    return Shard(
        workload.weight,
        None,
        softcap=None,
        scale=1.0,
        vocabulary_size=workload.weight.shape[0],
        linear=linear_,
        ladder=ladder,
    )
