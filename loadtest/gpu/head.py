"""The head of the blueprint's three models: certified against cuBLAS.

Two measures per case. ``device``: CUDA graphs alone, without the host. ``step``: by the host's
clock, from hidden states on the device to token ids on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.configuration import GPU_TIER
from lexshard.actors.head.gpu.device_shard import CAPACITY, DeviceShard
from lexshard.actors.head.screens import tier_bytes
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels import pool
from lexshard.kernels.draw import draw
from lexshard.kernels.quantize import Int8Tier, quantize
from lexshard.kernels.rows.triton_kernel import canonical_logits
from lexshard.kernels.screen.gpu.tensor_cores import place, screen
from lexshard.loadtest.bench.contenders.head import choose
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.head_workload import (
    SAMPLING_METHODS,
    draw_from_all,
    needs,
)
from lexshard.loadtest.bench.synthetic.heads import synthetic_head, synthetic_hidden
from lexshard.loadtest.gpu.timing import Budget, Call, Timer, in_turns

DEVICE = Measure("device", "ms", higher_is_better=False)
STEP = Measure("step", "ms", higher_is_better=False)
BANDWIDTH = Measure("bandwidth", "GB/s", higher_is_better=True)
RESCORED = Measure("rescored", "tokens per row", higher_is_better=False)
FALLBACKS = Measure("fallbacks", "share of rows", higher_is_better=False)
DIFFERENCES = Measure("token differences", "of rows", higher_is_better=False)

POSITION = 7
OURS = "certified"
NUCLEUS = "top-p 0.95"  # of which no tier is screened: every canonical logit is computed
WISHES = ("greedy", "sample", "top-50", NUCLEUS)
METHODS = {
    wish: SAMPLING_METHODS[name]
    for wish, name in (("greedy", "greedy"), ("sample", "gumbel"), ("top-50", "top50"))
}
METHODS[NUCLEUS] = Need("nucleus-draw", top_p=0.95, inverse_temperature=1.0)
BATCHES = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class HeadDimensions:
    """``vocabulary`` x ``columns``, and a model that has such a head."""

    model: str
    vocabulary: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.vocabulary:,} x {self.columns:,}"


HEADS = (
    HeadDimensions("Llama 3.1 8B", 128_256, 4_096),
    HeadDimensions("Qwen 2.5 7B", 151_936, 3_584),
    HeadDimensions("Gemma 2 2B", 262_144, 2_304),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure: smaller in tests."""

    batches: tuple[int, ...] = BATCHES
    wishes: tuple[str, ...] = WISHES
    runs: int = 7
    seed: int = 0
    checked_rows: int = 64
    capacity: int = CAPACITY


@dataclass(slots=True)
class Bench:
    """One head under measurement; ``save`` is called after every case."""

    dimensions: HeadDimensions
    timer: Timer
    report: Report
    budget: Budget
    settings: Settings
    save: Callable[[], None]
    left_out: list[str] = field(default_factory=list)  # what did not fit the budget
    weight: torch.Tensor = field(init=False)
    hidden: torch.Tensor = field(init=False)

    def run(self) -> int:
        """Measures every wish and batch that fits the budget; returns how many tokens were wrong.

        A wrong token is one that the canonical logits of the whole vocabulary would not give.
        """
        settings, dimensions = self.settings, self.dimensions
        if self.budget.spent:
            self.left_out.append(dimensions.name)
            return 0
        self.weight = synthetic_head(
            dimensions.vocabulary,
            dimensions.columns,
            seed=settings.seed,
            device=self.timer.device,
        )
        rows = max(*settings.batches, settings.checked_rows)
        self.hidden = synthetic_hidden(self.weight, rows, seed=settings.seed + 1)
        with pool.every_core():
            tier = quantize(self.weight.cpu(), GPU_TIER)
        self._measure_screen(tier)
        shard = DeviceShard(
            self.weight,
            None,
            None,
            1.0,
            dimensions.vocabulary,
            tier,
            device=self.timer.device,
            capacity=settings.capacity,
        )
        for rows, wish in product(settings.batches, settings.wishes):
            if self.budget.spent:
                self.left_out.append(f"{dimensions.name}: {rows} rows, {wish}")
                continue
            self._measure_case(shard, rows, wish)
            self.save()
        # Whether tokens are right is looked at even where time is over.
        wrong = self._count_wrong(shard)
        self.save()
        return wrong

    def _labels(self, **more: str | int) -> CaseLabels:
        return {"head": self.dimensions.name, "model": self.dimensions.model, **more}

    def _device(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        return in_turns(self.timer.device_run, calls, self.settings.runs, self.budget)

    def _measure_screen(self, tier: Int8Tier) -> None:
        """The screen alone, and the bytes per second it reads."""
        placed = place(tier, self.timer.device)
        for rows in self.settings.batches:
            states = self.hidden[:rows].contiguous()
            call = self.timer.captured(partial(screen, states, placed))
            times = self._device({"screen": call})
            labels = self._labels(rows=rows)
            self.report.add(labels, DEVICE, times)
            rates = [tier_bytes(tier) / each / 1e6 for each in times["screen"]]
            self.report.add(labels, BANDWIDTH, {"screen": rates})

    def _measure_case(self, shard: DeviceShard, rows: int, wish: str) -> None:
        asked = RowTable.of(needs(METHODS[wish], rows, POSITION))
        hidden = self.hidden[:rows].contiguous()
        labels = self._labels(rows=rows, wish=wish)
        certificates = shard.rescore(shard.screen(hidden, asked)).certificates
        rescored = [float(each.rescored_rows) for each in certificates]
        self.report.add(labels, RESCORED, {OURS: rescored})
        fallbacks = [float(each.fallback) for each in certificates]
        self.report.add(labels, FALLBACKS, {OURS: fallbacks})
        peers = _peers(self.weight, hidden, wish)
        if wish != NUCLEUS and not any(fallbacks):  # else a step does not end with its graph
            graphs = {name: self.timer.captured(call) for name, call in peers.items()}
            device = self._device({OURS: shard.replay(rows), **graphs})
            self.report.add(labels, DEVICE, device, ours=OURS)
            read = sum(each.bytes_read for each in certificates)
            dense_bytes = self.weight.numel() * self.weight.element_size()
            rates = {
                name: [(read if name == OURS else dense_bytes) / each / 1e6 for each in times]
                for name, times in device.items()
            }
            self.report.add(labels, BANDWIDTH, rates)

        def step() -> object:
            return _drawn(shard, hidden, asked)

        walls = {OURS: step, **{name: _to_host(call) for name, call in peers.items()}}
        times = in_turns(self.timer.wall_run, walls, self.settings.runs, self.budget)
        self.report.add(labels, STEP, times, ours=OURS)

    def _count_wrong(self, shard: DeviceShard) -> int:
        """Tokens of the certified head that are not those of all canonical logits."""
        states = self.hidden[: self.settings.checked_rows]
        logits = canonical_logits(states, self.weight).cpu().numpy()
        wrong = 0
        for wish in self.settings.wishes:
            asked = needs(METHODS[wish], len(states), POSITION)
            rows = RowTable.of(asked)
            ours = _drawn(shard, states, rows)
            expected = draw_from_all(logits, asked)
            differences = {OURS: [float(np.mean(ours != expected))]}
            if wish == "greedy":
                theirs = (states.to(self.weight.dtype) @ self.weight.T).argmax(dim=1)
                differing = theirs.cpu().numpy() != expected
                differences["cuBLAS + argmax"] = [float(np.mean(differing))]
            self.report.add(self._labels(wish=wish), DIFFERENCES, differences)
            wrong += int(np.sum(ours != expected))
        return wrong


def _drawn(shard: DeviceShard, hidden: torch.Tensor, rows: RowTable) -> npt.NDArray[np.int64]:
    """The tokens [N] that the host draws from what the shard finds."""
    found = shard.rescore(shard.screen(hidden, rows))
    cut = [each.truncated for each in found.certificates]
    controls = rows.controls._replace(top_p=np.where(cut, 1.0, rows.controls.top_p))
    return draw(found.ids, found.logits, found.offsets, controls)


def _to_host(call: Callable[[], torch.Tensor]) -> Call:
    return lambda: call().cpu()


def _peers(
    weight: torch.Tensor, hidden: torch.Tensor, wish: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """The dense ways to the same kind of token, each ending with token ids on the device."""
    rounded, transposed = hidden.to(weight.dtype), weight.T

    def cublas() -> torch.Tensor:
        return choose((rounded @ transposed), METHODS[wish], None)

    ends = {"greedy": "argmax", "sample": "softmax + draw", NUCLEUS: "sort + draw"}
    return {f"cuBLAS + {ends.get(wish, 'top-k + draw')}": cublas}
